"""Profiles of Hypothesis: `make test` always tries the same examples, a deeper run new ones.

A commit must not fail for an example for which its parent fails too. Search for new examples with

    pytest --hypothesis-profile=deep tests/unit tests/encoders tests/server/test_tool_parsers.py

and keep each finding as an `@example`.
"""

from __future__ import annotations


def register_profiles() -> None:
    """Load the profile of fixed examples; without Hypothesis nothing happens, and its tests are not collected."""
    try:
        from hypothesis import HealthCheck, settings
        from hypothesis.internal.conjecture import providers
    except ImportError:
        return
    # neither may time be a reason: a machine may be slow, and the tests of a core's share differ from run to run
    settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    anywhere = settings.get_profile("any_machine")
    settings.register_profile("fixed", anywhere, derandomize=True)
    settings.register_profile("deep", anywhere, print_blob=True, max_examples=1000)
    settings.load_profile("fixed")
    collect = getattr(providers, "_get_local_constants", None)
    if collect is None:
        return  # another version of Hypothesis

    def constants_of_source() -> object:
        """Hypothesis also tries the constants of whatever source is imported: of other tests, and of later edits."""
        return collect() if not settings.default.derandomize else providers._local_constants

    providers._get_local_constants = constants_of_source  # type: ignore[attr-defined]
