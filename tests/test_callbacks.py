"""What the default callback shows: a line a round, and whatever a user may want to look at."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import pytest

from jdiloco import events
from jdiloco.callbacks import DETAILS, TO_LOOK_AT, log_events
from jdiloco.events import Event
from tests.session.nodes import algorithm, memory, run_script, session

ROUNDS = 6
MODEL = {"a": jnp.ones(8), "b": jnp.ones(8)}


def test_a_round_is_one_line_at_info_and_all_of_it_at_debug(caplog):
    caplog.set_level(logging.DEBUG, logger="jdiloco")
    settings = algorithm(sync_every=4, fragments=2, overlap_steps=0)
    with session(MODEL, settings, memory(), callbacks=[log_events]) as s:
        params = s.params
        for _ in range(2 * ROUNDS):
            params = s.step({name: leaf - 1 for name, leaf in params.items()}, samples=1)
    shown = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    commits = [line for line in shown if " Committed " in line]
    assert len(commits) >= ROUNDS - 1
    assert len(shown) <= len(commits) + 3  # Created, joined and left.
    assert all(" cosine=-" in line for line in commits)  # There is no pair of one.
    details = " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG)
    for kind in ("Published", "Aligned", "Timed"):
        assert f" {kind} " in details


def test_no_event_is_both_a_detail_and_to_be_looked_at():
    assert not set(DETAILS) & set(TO_LOOK_AT)
    assert set(DETAILS) | set(TO_LOOK_AT) <= set(Event.__subclasses__())


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", ["INFO", "WARNING"]),
        ("logging.getLogger('jdiloco').setLevel(logging.DEBUG)", ["DEBUG", "INFO", "WARNING"]),
        ("logging.getLogger('jdiloco').setLevel(logging.WARNING)", ["WARNING"]),
        ("logging.basicConfig(level=logging.WARNING)", ["INFO", "WARNING"]),
    ],
)
def test_a_level_is_all_that_a_program_has_to_choose(before, lines):
    """Handlers appear where there are none; the library's own shows the time of day."""
    printed = run_script(
        f"""
        import logging, sys
        sys.stderr = sys.stdout
        from jdiloco import events
        from jdiloco.callbacks import log_events
        {before}
        log_events(events.Waiting(node="DEBUG", round=1))
        log_events(events.Left(node="INFO", because="", steps=1, processed=1, merged=1, dropped=0,
                               pending=0))
        log_events(events.Warned(node="WARNING", message=""))
        """
    )
    found = [word for word in printed.split() if word in ("DEBUG", "INFO", "WARNING")]
    assert found == lines, printed


def test_events_show_nothing_as_a_dash():
    event = events.Committed(
        node="n", round=0, fragment=0, version=1, participants=("n",), rejected=(), expected=1,
        void=False, closer="n", cosine=None,
    )  # fmt: skip
    assert str(event).endswith("rejected=- expected=1 void=False closer=n cosine=-")
