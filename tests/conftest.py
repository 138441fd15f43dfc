"""What every test run needs: one torch thread a worker, no network, and generous but repeatable hypothesis settings."""
import os

# Before anything imports torch: two workers share two cores, and two threads each make tiny models ten times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a bare checkout on a GPU box has no hypothesis, and its GPU tests need none
    pass
else:
    settings.register_profile("minengine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI")))
    settings.load_profile("minengine")
