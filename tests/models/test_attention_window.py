"""A window over a model that sees all: what changes in its spec and program."""

import pytest

from octavo.errors import InvalidParameterError
from octavo.models.arena import live_spans
from octavo.models.attention_window import with_attention_window
from octavo.models.decoder import emit_decoder
from octavo.models.program import Attend, RopeStore
from octavo.testing.random_weights import make_random_model


def ops_of(program, kind):
    return [op for op in program.ops if isinstance(op, kind)]


def test_every_layer_sees_the_window_and_reads_sinks_from_where_it_last_followed_them():
    program = make_random_model(window_and_sinks=(20, 5)).program

    assert [(op.window, op.num_sinks, op.sink_q) for op in ops_of(program, Attend)] == [(20, 5, "sink_q")] * 2
    assert [(op.sink_position, op.sink_q) for op in ops_of(program, RopeStore)] == [(24, "sink_q")] * 2
    assert len(live_spans(program)["sink_q"]) == 2, "filled and read once per layer"
    assert program.buffers["sink_q"].width == 6 * 8


def test_a_window_without_sinks_needs_no_second_queries():
    model = make_random_model(window_and_sinks=(20, 0))

    assert model.program == make_random_model(windows=(20, 20)).program
    assert "sink_q" not in model.program.buffers


def test_without_a_window_nothing_changes():
    spec = make_random_model().spec

    assert with_attention_window(spec, window=None, num_sinks=0) is spec


def test_weights_and_sizes_stay_as_they_are():
    spec = make_random_model().spec
    windowed = with_attention_window(spec, window=20, num_sinks=5)

    assert [(group.layers, group.window, group.num_sinks) for group in windowed.kv_groups] == [((0, 1), 20, 5)]
    assert emit_decoder(windowed).buffers.keys() - emit_decoder(spec).buffers.keys() == {"sink_q"}
    assert windowed.num_parameters == spec.num_parameters and windowed.max_position == spec.max_position


@pytest.mark.parametrize("windows", [(None, 20), (20, 20)])
def test_a_model_with_windows_of_its_own_is_refused(windows):
    with pytest.raises(InvalidParameterError, match="window of 20 tokens of its own"):
        with_attention_window(make_random_model(windows=windows).spec, window=64, num_sinks=4)
