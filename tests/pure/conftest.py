"""Settings of hypothesis for the tests that need no torch: repeatable, and without deadlines."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pure",
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pure")
