import pytest

from shardwise.cost.device_peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA B200", "float32", 75e12),
        ("NVIDIA B300 SXM6 AC", "float8", 4500e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("AMD Instinct MI300X", "float8", 2615e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
    ],
)
def test_a_known_device_has_its_makers_dense_peak(name, precision, peak):
    assert peak_flops(name, precision) == peak


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("AMD EPYC 9654 96-Core Processor", "bfloat16"),
        ("NVIDIA A1000", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA H100", "bfloat16"),  # SXM or PCIe? They differ
        ("Tesla V100-SXM2-16GB", "bfloat16"),  # has no bfloat16
        ("NVIDIA H100 80GB HBM3", "float64"),
        ("", "bfloat16"),
    ],
)
def test_an_unknown_device_or_precision_has_no_peak(name, precision):
    assert peak_flops(name, precision) is None
