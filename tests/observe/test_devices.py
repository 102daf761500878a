import pytest

from shardwise.observe import memory_kind, mfu, peak_flops, peak_memory


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
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
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
def test_an_unknown_device_or_precision_has_no_peak_and_no_mfu(name, precision):
    peak = peak_flops(name, precision)
    assert peak is None
    assert mfu(1000.0, 1e9, 8, peak) is None


def test_mfu_is_model_flops_over_the_peak_of_all_devices():
    # PaLM 540B (Chowdhery et al. 2022, appendix B): 238.3k tokens/s on 6,144 TPU v4 of 275 TFLOP/s is 46.2 %
    # with attention counted, from 6 N + 12 L H Q T = 3.28e12 FLOPs a token.
    flops = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert mfu(238.3e3, flops, 6144, 275e12) == pytest.approx(0.462, abs=1e-3)


def test_peak_memory_of_a_cpu_process_holds_what_was_once_allocated():
    before = peak_memory("cpu")
    block = bytearray(b"x") * (64 << 20)
    del block
    assert peak_memory("cpu") >= before
    assert peak_memory("cpu") >= 64 << 20
    assert memory_kind("cpu") != memory_kind("cuda")
