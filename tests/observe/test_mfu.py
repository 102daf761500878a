import pytest

from shardwise.observe import memory_kind, mfu, peak_memory


def test_mfu_is_not_known_without_a_peak():
    assert mfu(1000.0, 1e9, 8, None) is None


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
