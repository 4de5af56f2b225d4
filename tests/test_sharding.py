"""The mesh: what lies where, and that it changes no number."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ralm_jax import checkpoint
from ralm_jax.errors import UsageError
from ralm_jax.model import abstract
from ralm_jax.models import ENCODERS, READERS
from ralm_jax.reader import Reader, load_reader
from ralm_jax.scoring import Scorer, label_log_probs
from ralm_jax.sharding import make_mesh, on_mesh, parse_mesh, shard_batch
from ralm_jax.weights import flat_state, stored_shapes
from ralm_jax.windows import Windows
from tests import tiny

HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4}
FAMILIES = {name: replace(config, **HEADS) for name, config in tiny.READERS.items() if not name.startswith("llama")} | {
    "llama, 2 key/value heads": tiny.LLAMA,
    "llama, 4 key/value heads": replace(tiny.LLAMA, num_kv_heads=4),
    "llama, 8 key/value heads": tiny.READERS["llama-mha-bias"],
    "vocabulary of 50,257": replace(tiny.GPT2, vocab_size=50257, **HEADS),
    "untied vocabulary of 131": replace(tiny.GPTJ, vocab_size=131, **HEADS),
}
MESHES = [
    pytest.param((8, 1, 1), marks=pytest.mark.slow),
    pytest.param((1, 8, 1), marks=pytest.mark.slow),
    pytest.param((1, 1, 8), marks=pytest.mark.slow),
    (2, 2, 2),
]


def windows(vocabulary: int, count: int = 5, length: int = 24, labels: int = 6) -> Windows:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (count, length)).astype(np.int32)
    positions = rng.integers(0, length, (count, labels)).astype(np.int32)
    wanted = rng.integers(0, vocabulary, (count, labels)).astype(np.int32)
    return Windows(tokens, positions, wanted, np.ones((count, labels), bool))


def assert_placed(reader: Reader, mesh) -> None:
    """Every parameter lies where its axes say, cut into equal parts."""
    axes = {"embed": mesh.shape["fsdp"]} | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), mesh.shape["tensor"])
    for path, leaf in flat_state(reader.state).items():
        value = leaf.get_value()
        parts = [axes.get(axis, 1) for axis in leaf.get_metadata()["out_sharding"]]
        part = tuple(size // count for size, count in zip(value.shape, parts, strict=True))
        assert {shard.data.shape for shard in value.addressable_shards} == {part}, path
        indices = {str(shard.index) for shard in value.addressable_shards}
        assert len(indices) == np.prod(parts), path


VARIANTS = ("gpt2-untied", "opt", "opt-untied-no-bias", "llama, 8 key/value heads")  # of what is there already


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in FAMILIES]
)
def test_scores_are_those_of_one_device(family, shape):
    one, mesh = tiny.reader(FAMILIES[family]), make_mesh(*shape)
    several, asked = tiny.on(one, mesh), windows(one.config.vocab_size)
    assert_placed(several, mesh)
    expected = Scorer(one, 24, 6, batch_size=5).score(asked)
    scorer = Scorer(several, 24, 6, batch_size=5)  # 5 windows are no multiple of the devices that share them
    np.testing.assert_allclose(scorer.score(asked), expected, atol=1e-5, rtol=0)


def test_key_value_heads_lie_whole_where_the_mesh_has_more_parts():
    reader = tiny.on(tiny.reader(tiny.LLAMA), make_mesh(1, 1, 8))
    kernel = flat_state(reader.state)["layers.attention.k.kernel"]
    assert kernel.get_metadata()["out_sharding"] == ("layers", "embed", None, "head_dim")


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_model_on_disk_has_no_padding(tmp_path, kind):
    config = replace(tiny.GPT2 if kind == "gpt2" else tiny.BERT, vocab_size=131)
    family = READERS[kind] if kind == "gpt2" else ENCODERS[kind]
    _, state = abstract(family, config, make_mesh(1, 2, 4))
    table = flat_state(state)["embed.table"]
    assert table.get_value().shape == (132, 32)
    assert stored_shapes(state)["embed.table"] == (131, 32)


def test_checkpoints_go_from_mesh_to_mesh_without_padding(tmp_path):
    one = tiny.reader(replace(tiny.GPTJ, vocab_size=131))
    padded = tiny.on(one, make_mesh(1, 2, 4))
    padded.save(tmp_path / "hf")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    checkpoint.save(tmp_path / "orbax", padded.state)
    for kind in ("hf", "orbax"):
        tiny.assert_same(load_reader(str(tmp_path / kind), mesh=make_mesh(data=1)).state, one.state)
        again = load_reader(str(tmp_path / kind), mesh=make_mesh(1, 1, 4))
        tiny.assert_same(again.state, padded.state)


def test_the_padding_of_a_vocabulary_is_never_chosen():
    reader = tiny.on(tiny.reader(replace(tiny.GPTJ, vocab_size=131)), make_mesh(1, 2, 4))
    with on_mesh(reader.mesh):
        logits = nnx.merge(reader.graphdef, reader.state)(jnp.zeros((2, 3), jnp.int32))
    assert logits.shape == (2, 3, 132)
    assert (np.asarray(logits)[:, :, 131:] == -np.inf).all()
    assert reader.logits(jnp.zeros((2, 3), jnp.int32)).shape == (2, 3, 131)


@pytest.mark.parametrize(
    ("config", "mesh", "parameter", "axis", "size", "works"),
    [
        (tiny.GPT2, {"tensor": 8}, r"layers\.attention\.\w\.\w+", r"\w*heads", 4, "tensor=4"),
        (replace(tiny.LLAMA, mlp_size=51), {"tensor": 2}, r"layers\.mlp\.\w+\.kernel", "mlp", 51, "tensor=1"),
        (replace(tiny.LLAMA, hidden_size=36), {"fsdp": 8}, r"embed\.table", "embed", 36, "fsdp=6"),
    ],
)
def test_what_cannot_be_divided(config, mesh, parameter, axis, size, works):
    ((name, parts),) = mesh.items()
    message = f"{parameter}: {name}={parts} does not divide its axis '{axis}' of {size}; the next smaller .* {works}$"
    with pytest.raises(UsageError, match=message):
        abstract(READERS[config.model_type], config, make_mesh(data=1, **mesh))


def test_parse_mesh():
    assert parse_mesh("data=2,fsdp=4,tensor=1") == {"data": 2, "fsdp": 4, "tensor": 1}
    assert parse_mesh(" tensor = 8") == {"tensor": 8}
    assert dict(make_mesh(**parse_mesh("fsdp=2")).shape) == {"data": 4, "fsdp": 2, "tensor": 1}


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=0", "data=-1", "model=2", "data=2,data=4", "data=2 fsdp=4"]
)
def test_meshes_that_are_none(text):
    with pytest.raises(UsageError, match="expected such as data=2,fsdp=4,tensor=1"):
        parse_mesh(text)


@pytest.fixture(scope="module", params=[(2, 1, 4), (2, 2, 2)], ids=str)
def compiled(request):
    mesh = make_mesh(*request.param)
    config = replace(tiny.LLAMA, vocab_size=1000, num_kv_heads=8)
    reader, asked = tiny.on(tiny.reader(config), mesh), windows(1000, count=8)
    with on_mesh(mesh):
        arrays = [shard_batch(mesh, x) for x in (asked.tokens, asked.positions, asked.labels)]
        program = label_log_probs.lower(reader.graphdef, reader.state, *arrays, 3).compile()
    return mesh, collectives(program.as_text())


class TestCompiledText:
    """What devices tell one another while windows are scored, from the compiled program."""

    def test_logits_stay_where_they_are(self, compiled):
        """All that is told of them is sums and maxima: nothing with a vocabulary, but a parameter over fsdp."""
        _, found = compiled
        assert found
        for kind, shape, _ in found:
            with_vocabulary = 1000 in shape or 1000 // 4 in shape or 1000 // 2 in shape
            assert not with_vocabulary or (kind == "all-gather" and len(shape) == 2 and 1000 not in shape), (
                kind,
                shape,
            )

    def test_rows_of_a_batch_have_nothing_to_tell_one_another(self, compiled):
        mesh, found = compiled
        replica = {device.id: at[0] for at, device in np.ndenumerate(mesh.devices)}
        for kind, shape, groups in found:
            for group in groups:
                assert len({replica[device] for device in group}) == 1, (kind, shape, group)


def collectives(text: str) -> list[tuple[str, tuple[int, ...], list[list[int]]]]:
    """Kind, shape of a result, and groups of devices of every collective in a compiled program."""
    found = []
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for results, kind, rest in re.findall(rf"= (.*?) ({kinds})(?:-start)?\((.*)", text):
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)[1]
            groups = [[int(x) for x in pair.split(",")] for pair in re.findall(r"[\d,]+\d", pairs)]
        else:
            groups = device_groups(re.search(r"replica_groups=(.*?), (?:dimensions|use_global)", rest)[1])
        for sizes in re.findall(r"\w+\[([\d,]*)\]", results):
            found.append((kind, tuple(int(size) for size in sizes.split(",") if size), groups))
    return found


def device_groups(text: str) -> list[list[int]]:
    """The groups of devices in any of the ways in which the compiler writes them."""
    if text.startswith("{"):  # {{0,1},{2,3}}
        return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):  # [groups, size]<=[sizes]T(order)
        shape, sizes, order = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
        return ordered(sizes, order).reshape([int(x) for x in shape.split(",")]).tolist()
    # mesh['a'=2,'b'=4], device_ids=([sizes]T(order)) {'a'}
    axes = re.findall(r"'(\w+)'=(\d+)", text)
    sizes = [int(size) for _, size in axes]
    placed = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text)
    devices = ordered(*placed.groups()) if placed else np.arange(np.prod(sizes))
    names = re.search(r"\{(.*)\}$", text)[1].replace("'", "").split(",")
    moved = [i for i, (name, _) in enumerate(axes) if name in names]
    kept = [i for i in range(len(axes)) if i not in moved]
    return devices.reshape(sizes).transpose(*kept, *moved).reshape(-1, np.prod([sizes[i] for i in moved])).tolist()


def ordered(sizes: str, order: str | None) -> np.ndarray:
    shape = [int(x) for x in sizes.split(",")]
    devices = np.arange(np.prod(shape)).reshape(shape)
    return (devices if order is None else devices.transpose([int(x) for x in order.split(",")])).ravel()


def test_device_groups():
    assert device_groups("{{0,2},{1,3}}") == [[0, 2], [1, 3]]
    assert device_groups("[2,2]<=[4]") == [[0, 1], [2, 3]]
    assert device_groups("[2,2]<=[2,2]T(1,0)") == [[0, 2], [1, 3]]
    assert device_groups("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}") == [[0, 2], [1, 3]]
    assert device_groups("mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_0'}") == [[0, 1], [2, 3]]
