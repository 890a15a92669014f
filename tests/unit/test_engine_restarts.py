"""An engine that was lost is started again, but not without end where it serves for moments only."""

from paceline_server.engine.restarts import LASTING_SECONDS, Restarts


def test_after_a_long_life_the_next_start_is_at_once_however_often():
    restarts = Restarts()
    assert [restarts.pause_after(LASTING_SECONDS) for _ in range(100)] == [0.0] * 100


def test_pauses_grow_while_lives_are_short_and_the_fifth_in_a_row_is_the_last():
    restarts = Restarts()
    assert [restarts.pause_after(served) for served in (1.0, None, 59.0, 0.0, 1.0)] == [2.0, 4.0, 8.0, 16.0, None]


def test_a_long_life_wipes_out_the_short_ones_before_it():
    restarts = Restarts()
    pauses = [restarts.pause_after(served) for served in (1.0, None, 1.0, 1.0, 3_600.0, 1.0)]
    assert pauses[-2:] == [0.0, 2.0]


def test_a_first_start_that_fails_is_not_repeated():
    assert Restarts().pause_after(None) is None
