"""Parts of asynchronous training: messages and connections of a parameter server, its scheduler, and memory
that processes share. The drivers (drivers/) use them."""
