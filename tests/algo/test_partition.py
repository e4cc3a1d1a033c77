"""A fragment plan is a function of names, shapes and types."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.algo import by_bytes, partition, plan, strided
from jdiloco.errors import UsageError
from jdiloco.types import TensorSpec
from tests.algo.support import more


def spec(name, size, dtype="float32"):
    return TensorSpec(name, (size,), dtype)


def transformer(layers, prefix="layers/"):
    blocks = [spec(f"{prefix}{i}/{p}", n) for i in range(layers) for p, n in (("w", 16), ("b", 4))]
    return [spec("embed/w", 100), *blocks, spec("norm/scale", 4)]


def test_largest_first_each_to_the_lightest():
    specs = [spec("a", 5), spec("b", 4), spec("c", 3), spec("d", 3), spec("e", 3)]
    assert plan(by_bytes(), specs, 2) == (("a", "d"), ("b", "c", "e"))


def test_bytes_count_and_not_elements():
    specs = [spec("a", 10, "bfloat16"), spec("b", 6, "float32"), spec("c", 1)]
    assert plan(by_bytes(), specs, 2) == (("b",), ("a", "c"))


def test_ties_go_by_name_with_numbers_as_numbers():
    specs = [spec(f"l/{i}", 4) for i in (10, 2, 1)]
    assert plan(by_bytes(), specs, 3) == (("l/1",), ("l/2",), ("l/10",))


def test_as_many_fragments_as_tensors_is_one_tensor_each_even_without_bytes():
    specs = [spec("a", 0), spec("b", 0), spec("c", 3), spec("d", 0)]
    assert plan(by_bytes(), specs, 4) == (("c",), ("a",), ("b",), ("d",))


def test_one_fragment_holds_everything():
    assert plan(by_bytes(), transformer(2), 1) == (
        ("embed/w", "layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w", "norm/scale"),
    )


@pytest.mark.parametrize("fragments", [0, -1, 4])
def test_more_fragments_than_tensors_are_refused_with_both_numbers(fragments):
    with pytest.raises(UsageError, match=f"is {fragments}, and a model of 3 tensors has at most 3"):
        plan(by_bytes(), [spec("a", 1), spec("b", 1), spec("c", 1)], fragments)


sizes = st.lists(
    st.tuples(st.integers(0, 1000), st.sampled_from(["float32", "bfloat16"])), min_size=1
)


@more
@given(drawn=sizes, data=st.data())
def test_a_plan_covers_every_tensor_once_and_forgets_the_order_it_was_given(drawn, data):
    specs = [spec(f"t{i}", *each) for i, each in enumerate(drawn)]
    fragments = data.draw(st.integers(1, len(specs)))
    made = plan(by_bytes(), specs, fragments)
    assert sorted(name for part in made for name in part) == sorted(s.name for s in specs)
    assert len(made) == fragments
    assert all(made)
    assert plan(by_bytes(), data.draw(st.permutations(specs)), fragments) == made


@more
@given(drawn=st.lists(st.integers(1, 50), min_size=2, max_size=6), fragments=st.integers(1, 2))
def test_the_heaviest_fragment_is_within_a_third_of_the_best(drawn, fragments):
    specs = [spec(f"t{i}", size) for i, size in enumerate(drawn)]
    nbytes = {s.name: s.nbytes for s in specs}
    made = plan(by_bytes(), specs, fragments)
    best = min(
        max(
            sum(4 * n for n, at in zip(drawn, places, strict=True) if at == f)
            for f in range(fragments)
        )
        for places in itertools.product(range(fragments), repeat=len(drawn))
    )
    assert max(sum(nbytes[name] for name in part) for part in made) <= best * 4 / 3


@pytest.mark.parametrize("prefix", ["layers/", "blocks_", "gpt_neox.layers.", "h/", "Block_"])
def test_blocks_are_dealt_round_and_the_rest_is_balanced(prefix):
    made = plan(strided(), transformer(6, prefix), 3)
    dealt = [[name for name in part if name.startswith(prefix)] for part in made]
    assert dealt == [
        [f"{prefix}{i}/{part}" for i in (j, j + 3) for part in ("b", "w")] for j in range(3)
    ]
    assert "embed/w" in made[0]
    assert "norm/scale" in made[1]


def test_two_stacks_of_blocks_are_not_mixed_up():
    specs = [spec(f"{stack}/layers/{i}/w", 4) for stack in ("encoder", "decoder") for i in (0, 1)]
    assert plan(strided(), specs, 4) == (
        ("decoder/layers/0/w",),
        ("decoder/layers/1/w",),
        ("encoder/layers/0/w",),
        ("encoder/layers/1/w",),
    )


def test_tensors_outside_blocks_fill_fragments_that_got_none():
    assert plan(strided(), transformer(1), 3) == (
        ("layers/0/b", "layers/0/w"),
        ("embed/w",),
        ("norm/scale",),
    )


def test_a_norm_is_no_block():
    with pytest.raises(UsageError, match=r"matches no name, e\.g\. not 'layernorm_1/scale'"):
        plan(strided(), [spec("layernorm_1/scale", 4)], 1)


def test_too_many_fragments_for_the_blocks_are_refused_with_the_count():
    with pytest.raises(UsageError, match="2 blocks and 2 other tensors make at most 4"):
        plan(strided(), transformer(2), 5)


def test_a_block_pattern_of_ones_own():
    specs = [spec(f"stage{i}", 4) for i in range(4)]
    assert plan(strided(r"stage[0-9]+"), specs, 2) == (("stage0", "stage2"), ("stage1", "stage3"))


@pytest.mark.parametrize("bad", ["(", 3])
def test_a_block_pattern_is_a_regular_expression(bad):
    with pytest.raises(UsageError, match="`block_pattern` must be a regular expression"):
        strided(bad)


@pytest.mark.parametrize("made", [by_bytes(), strided(), strided("x[0-9]")])
def test_a_partition_survives_its_manifest(made):
    assert partition.from_json(partition.to_json(made)) == made
    assert partition.to_json(by_bytes()) == {"kind": "by_bytes"}


@pytest.mark.parametrize("value", [{"kind": "halves"}, {}, {"kind": "by_bytes", "x": 1}])
def test_an_unknown_partition_is_refused_with_those_there_are(value):
    with pytest.raises(UsageError, match="none of by_bytes, strided"):
        partition.from_json(value)


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """A partition of one's own, and a wrong one on request."""

    forget: bool = False

    def deal(self, specs, fragments):
        kept = specs[1:] if self.forget else specs
        return [kept[i::fragments] for i in range(fragments)]


def test_a_partition_of_ones_own_goes_through_the_same_door():
    specs = [spec("a", 1), spec("b", 100), spec("c", 1)]
    assert plan(Alphabet(), specs, 2) == (("a", "c"), ("b",))
    assert partition.from_json(partition.to_json(Alphabet()), known=[Alphabet]) == Alphabet()


def test_a_partition_that_forgets_a_tensor_is_refused():
    with pytest.raises(UsageError, match="must give each of 3 tensors to exactly one of 2"):
        plan(Alphabet(forget=True), [spec("a", 1), spec("b", 1), spec("c", 1)], 2)
