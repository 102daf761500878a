"""The proof: the same job on one device and on its layout, compared."""
