"""`ralm plan`: without libtpu, on this machine's devices; with it (slow), the bounds of golden_plan.json."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ralm_jax import cli_plan, plan, pod
from ralm_jax.cli import main
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.model import abstract
from ralm_jax.models import FAMILIES, SIZES
from ralm_jax.plan_report import Plan, Request
from ralm_jax.weights import stored_shapes
from tests import tiny
from train.causal import finetune_program

MAKERS = plan.MAKERS | {"finetune": finetune_program}
GOLDEN = json.loads((Path(__file__).parent / "golden_plan.json").read_text())


def answer(**changes):
    request = Request("llama2-70b", "v5p:2x2x2", "score", 1024, 16, {"data": 2, "fsdp": 1, "tensor": 4})
    gib = {"weights": 32.0, "inputs": 0.25, "temporaries": 1.5}
    values = {
        "request": request, "parameters": 68_976_648_192, "devices": 8, "memory": 95.73, "largest": True, "fits": True,
        "gib": gib, "flops": 1.4e11,
    }  # fmt: skip
    return Plan(**values | changes)


def save_config(folder, config):
    """A model's folder without weights."""
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return str(folder)


class TestReport:
    def test_the_table(self):
        assert "\n".join(answer().lines()) == (
            "model             llama2-70b, 68,976,648,192 parameters\n"
            "topology          v5p:2x2x2, 8 devices of 95.73 GiB\n"
            "task              score, windows of 1,024 tokens, bfloat16, attention auto\n"
            "mesh              data=2,fsdp=1,tensor=4\n"
            "batch             16 windows, the most that fit\n"
            "FLOPs a token     1.4e+11\n"
            "fits              yes\n"
            "\n"
            "                  GiB a device\n"
            "weights                  32.00\n"
            "inputs                    0.25\n"
            "temporaries               1.50\n"
            "together                 33.75"
        )

    def test_what_does_not_fit_says_by_how_much(self):
        tight = answer(memory=31.24, fits=False, largest=False)
        assert "fits              no: about 2.51 GiB a device too much" in list(tight.lines())
        assert tight.to_json()["lacking"] == pytest.approx(2.51)

    def test_json_and_back(self):
        content = json.loads(json.dumps(answer().to_json()))
        assert content["total"] == 33.75
        assert Plan.from_json(content) == answer()


class TestMeshes:
    FIVE_HEADS = replace(tiny.GPT2, num_heads=5, num_kv_heads=5)

    def test_a_frozen_model_is_held_by_few_devices_and_tensor_comes_first(self):
        tried = [tuple(sizes.values()) for sizes in plan.candidates(16, "score")]
        assert tried[:6] == [(16, 1, 1), (8, 1, 2), (8, 2, 1), (4, 1, 4), (4, 2, 2), (4, 4, 1)]
        assert tried[-4:] == [(1, 2, 8), (1, 4, 4), (1, 8, 2), (1, 16, 1)]

    def test_training_state_is_spread_over_all(self):
        tried = [tuple(sizes.values()) for sizes in plan.candidates(32, "finetune")]
        assert tried == [(1, 32, 1), (1, 16, 2), (1, 8, 4), (1, 4, 8)]

    @pytest.mark.parametrize("task", ["score", "encode", "finetune"])
    @pytest.mark.parametrize("devices", [1, 6, 24])
    def test_all_devices_have_a_part(self, task, devices):
        assert {math.prod(sizes.values()) for sizes in plan.candidates(devices, task)} == {devices}

    def trials(self, share, config=tiny.READERS["llama-mha-bias"]):
        """On 8 devices, each of which has room for `share` of the weights, and that what is computed takes."""
        family = FAMILIES[config.model_type]
        whole = plan.Trials(pod.Pod(jax.devices(), 0), family, config, 16, "float32", plan.score_program, print)
        given = sum(whole.program({"data": 8, "fsdp": 1, "tensor": 1}, 8).given().values())
        return replace(whole, pod=pod.Pod(jax.devices(), int(share * given / plan.WEIGHTS_SHARE)))

    def test_those_that_hold_the_weights(self):
        request = Request("", "", "score")
        first = lambda share: next(plan.fitting_meshes(self.trials(share), request))  # noqa: E731
        assert first(1.01) == {"data": 8, "fsdp": 1, "tensor": 1}
        assert first(0.55) == {"data": 4, "fsdp": 1, "tensor": 2}
        assert first(0.16) == {"data": 1, "fsdp": 1, "tensor": 8}

    def test_where_none_does_the_one_that_comes_nearest(self):
        (sizes,) = plan.fitting_meshes(self.trials(0.01), Request("", "", "score"))
        assert sizes["data"] == 1

    def test_those_that_cannot_cut_the_model_are_left_out(self):
        tried = list(plan.fitting_meshes(self.trials(1.01, self.FIVE_HEADS), Request("", "", "score")))
        assert [sizes["tensor"] for sizes in tried] == [1, 1, 1, 1]

    def test_a_batch_that_nothing_can_share(self):
        request = Request("", "", "finetune", batch_size=3)
        with pytest.raises(UsageError, match=r"batch of 3 cannot be shared by the 8 parts of mesh data=1,fsdp=8"):
            list(plan.fitting_meshes(self.trials(1.01, self.FIVE_HEADS), request))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40, 1000, 123_456])
@pytest.mark.parametrize("fixed", [0.0, 0.7])
@pytest.mark.parametrize("error", [1.0, 1.03])
def test_the_largest_batch_is_found_in_few_trials(most, fixed, error):
    """Where memory grows with the batch, and the estimate of what does not fit is off."""

    def needs(n):
        return plan.Needs(n <= most, {"all": (fixed + (1 - fixed) * n / most) * (1 if n <= most else error)})

    low, high, tried = (1, needs(1)), None, []
    while (n := plan.next_trial(low, high, 1.0)) is not None:
        tried.append(n)
        low, high = ((n, needs(n)), high) if needs(n).fits else (low, (n, needs(n)))
    assert most - max(1, most // 8) <= low[0] <= most
    assert len(tried) <= 7
    assert len(set(tried)) == len(tried)


class TestConfiguration:
    def test_named(self):
        assert plan.configuration("llama2-70b", "score")[1] is SIZES["llama2-70b"]

    def test_a_folder_or_its_config_without_weights(self, tmp_path):
        folder = save_config(tmp_path, tiny.LLAMA)
        for name in (folder, f"{folder}/config.json"):
            family, config = plan.configuration(name, "finetune")
            assert (family.name, config) == ("Llama", tiny.LLAMA)

    def test_of_the_wrong_kind(self, tmp_path):
        with pytest.raises(UsageError, match="gpt2: --task encode needs an encoder"):
            plan.configuration("gpt2", "encode")
        with pytest.raises(RalmError, match="model_type"):
            plan.configuration(save_config(tmp_path, tiny.BERT), "score")


class TestFlops:
    def flops(self, name, window, task):
        config = SIZES[name]
        _, state = abstract(FAMILIES[config.model_type], config, jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor")))
        return plan.token_flops(config, stored_shapes(state), window, task)

    @pytest.mark.parametrize("name", ["llama2-70b", "gpt2-xl", "opt-1.3b"])
    def test_as_the_benchmark_counts_them(self, name):
        window_flops = pytest.importorskip("benchmarks.scoring").window_flops
        expected = window_flops(SIZES[name], 1024, plan.LABELS) / 1024
        assert self.flops(name, 1024, "score") == pytest.approx(expected)

    def test_training_is_about_six_times_the_parameters(self):
        assert self.flops("llama2-7b", 1, "finetune") == pytest.approx(6 * 6.7e9, rel=0.02)


class TestHere:
    """The whole way, with this machine's devices in place of a pod."""

    @pytest.fixture(autouse=True)
    def pod(self, monkeypatch):
        monkeypatch.setattr(plan, "open_pod", lambda name: pod.Pod(jax.devices(), 64 << 20))

    def test_scoring(self, tmp_path):
        folder, told = save_config(tmp_path, tiny.GPT2), []
        request = Request(folder, "here", "score", window=64, batch_size=16, dtype="float32")
        made = plan.make_plan(request, MAKERS, told.append)
        _, state = abstract(FAMILIES["gpt2"], tiny.GPT2, jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor")))
        weights = sum(4 * math.prod(shape) for shape in stored_shapes(state).values())
        assert made.fits
        assert (made.request.mesh, made.devices) == ({"data": 8, "fsdp": 1, "tensor": 1}, 8)
        assert made.gib["weights"] * plan.GIB == pytest.approx(weights)
        assert made.gib["inputs"] * plan.GIB == pytest.approx(4 * 2 * (64 + 2 * plan.LABELS))
        assert made.gib["temporaries"] > 0
        assert told == ["compiling for data=8,fsdp=1,tensor=1: 16 windows of 64 tokens"]

    def test_training_keeps_two_numbers_a_parameter_beside_it(self, tmp_path):
        folder = save_config(tmp_path, tiny.LLAMA)
        request = Request(folder, "here", "finetune", window=32, batch_size=8, mesh={"fsdp": 4, "tensor": 2})
        made = plan.make_plan(request, MAKERS, print)
        assert made.request.mesh == {"data": 1, "fsdp": 4, "tensor": 2}
        assert made.gib["optimizer"] == pytest.approx(2 * made.gib["weights"], rel=1e-3)
        assert made.gib["outputs"] < made.gib["weights"]  # the state is updated in place

    @pytest.mark.slow
    def test_encoding(self, tmp_path):
        folder = save_config(tmp_path, tiny.BERT)
        made = plan.make_plan(Request(folder, "here", "encode", batch_size=8), MAKERS, print)
        assert made.request.window == tiny.BERT.max_positions

    def test_the_largest_batch_and_what_does_not_fit(self, tmp_path, monkeypatch):
        """Of a compiler that refuses what takes more than 64 MiB, at 3 MiB a window."""

        def compile_for(mesh, step, args):
            size = 3 * args[2].shape[0] / 8
            if size > 60:
                raise pod.TooLarge(f"needs {size}M, 64.00M is there")
            return {"temporaries": int(size * (1 << 20))}

        monkeypatch.setattr(plan, "compile_for", compile_for)
        folder = save_config(tmp_path, tiny.GPT2)
        made = plan.make_plan(Request(folder, "here", "score"), MAKERS, print)
        assert made.largest
        assert 17 * 8 < made.request.batch_size <= 20 * 8
        made = plan.make_plan(Request(folder, "here", "score", batch_size=240), MAKERS, print)
        assert not made.fits
        assert made.lacking == pytest.approx((90 - 64) / 1024)


class TestCompiler:
    class Step:
        """What the compiler refuses with `message`."""

        def __init__(self, message):
            self.message = message

        def lower(self, *args):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(self.message)

    @pytest.mark.parametrize(
        "text",
        [
            "E1000: Ran out of memory on HBM, the total memory required for HLO temporaries (1.50T) exceeds available "
            "HBM (95.73G). HLO module: jit_update.\nSee error_1000",
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 1.50T of 95.73G hbm.",
        ],
    )
    def test_too_much_memory(self, text, one_device):
        with pytest.raises(pod.TooLarge) as refused:
            pod.compile_for(one_device, self.Step(f"RESOURCE_EXHAUSTED: {text}"), ())
        assert (refused.value.needs, refused.value.memory) == (3 << 39, int(95.73 * plan.GIB))

    @pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem", "INTERNAL: oh"])
    def test_other_failures_are_one_line(self, text, one_device):
        with pytest.raises(RalmError, match=r"^the TPU compiler fails: (Ran out of .* vmem|oh)$"):
            pod.compile_for(one_device, self.Step(f"{text}\nand pages of it"), ())

    @pytest.mark.parametrize("name", ["v5p", "v5p:8", "v5p:2x2x", "2x2", "v5p-8"])
    def test_topologies_that_are_none(self, name):
        with pytest.raises(UsageError, match=r"expected such as v5p:2x2x4 or v5e:4x8"):
            pod.open_pod(name)


class TestCommand:
    def run(self, capsys, *args):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "gpt2", "--topology", "v5e:2x2", "--task", "score", *args])
        return ended.value.code, capsys.readouterr()

    def child(self, tmp_path, monkeypatch, script):
        """Has `script` run in place of the process that compiles."""
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def test_without_libtpu(self, capsys, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        code, said = self.run(capsys)
        assert (code, said.out) == (2, "")
        assert said.err == (
            "ralm: error: libtpu, which compiles for TPUs, is not installed: pip install 'ralm-jax[plan]'\n"
        )

    def test_what_does_not_fit_ends_with_1(self, tmp_path, capsys, monkeypatch):
        tight = json.dumps({"plan": answer(memory=31.24, fits=False).to_json()})
        self.child(
            tmp_path, monkeypatch, f"echo noise; echo noise >&2; echo '{{\"told\": \"compiling\"}}'; echo '{tight}'"
        )
        code, said = self.run(capsys, "--json", str(tmp_path / "plan.json"), "--mesh", "data=4", "--batch-size", "8")
        assert code == 1
        assert said.err == "ralm: error: gpt2 does not fit v5e:2x2: about 2.51 GiB a device too much\n"
        assert said.out.startswith("compiling\nmodel  ")
        assert json.loads((tmp_path / "plan.json").read_text())["lacking"] == pytest.approx(2.51)
        asked = Request(**json.loads((tmp_path / "asked").read_text()))
        assert asked == Request("gpt2", "v5e:2x2", "score", batch_size=8, mesh={"data": 4})

    def test_errors_of_the_other_process(self, tmp_path, capsys, monkeypatch):
        self.child(tmp_path, monkeypatch, """echo '{"error": "topology v9:2x2: unknown", "exit_code": 2}'""")
        code, said = self.run(capsys)
        assert (code, said.err) == (2, "ralm: error: topology v9:2x2: unknown\n")

    def test_a_process_that_dies(self, tmp_path, capsys, monkeypatch):
        self.child(tmp_path, monkeypatch, "echo chatter >&2; echo 'libtpu.so: wrong ELF class' >&2; exit 7")
        code, said = self.run(capsys)
        assert (code, said.err) == (
            1, "ralm: error: the process that compiles ended with code 7: libtpu.so: wrong ELF class\n"
        )  # fmt: skip

    def test_sizes_are_checked_before(self, capsys):
        code, said = self.run(capsys, "--window", "0")
        assert code == 2
        assert "window" in said.err


@pytest.fixture
def libtpu():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: pip install 'ralm-jax[plan]'")


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
class TestPods:
    @pytest.mark.parametrize("name", GOLDEN)
    def test_memory_is_within_the_golden_bounds(self, name):
        """Nobody should need more memory unknowingly; who needs less lowers the bounds."""
        made, bounds = cli_plan.ask(Request(**GOLDEN[name]["request"])), GOLDEN[name]["gib"]
        assert made.fits == GOLDEN[name]["fits"]
        measured = made.gib | {"together": made.total}
        assert {part: low <= measured[part] <= high for part, (low, high) in bounds.items()} == dict.fromkeys(
            bounds, True
        )
        assert made.total <= made.memory or not made.fits

    def test_what_does_not_fit_says_by_how_much(self):
        made = cli_plan.ask(Request("llama2-13b", "v5e:1x1", "score", 1024, 8))
        assert not made.fits
        assert made.lacking == pytest.approx(made.total - made.memory)
        assert made.lacking > 0

    def test_an_unknown_topology_names_those_that_are_known(self):
        with pytest.raises(UsageError, match=r"^topology v9:2x2: libtpu [\d.]+ knows .*v4, v5e, v5p, v6e"):
            cli_plan.ask(Request("gpt2", "v9:2x2", "score"))
        with pytest.raises(UsageError, match=r"^topology v5p:3x1x1: .*not divisible"):
            cli_plan.ask(Request("gpt2", "v5p:3x1x1", "score"))
