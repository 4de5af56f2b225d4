"""`ralm plan`. The plan is made in a process of its own, whose JAX is libtpu's: `python -m ralm_jax.cli_plan` reads a
request from its standard input and writes lines of JSON, of which the last is the plan or what went wrong.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ralm_jax.cli_options import check_output_file
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.plan_report import ComputeDType, Request, Task
from ralm_jax.plan_report import Plan as Answer
from ralm_jax.settings import at_least

# The devices are libtpu's, of a topology that is named; those of this machine are left alone.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclass(frozen=True)
class Plan:
    """Tell whether a model fits a pod of TPUs that need not be there: its step is compiled for it. Exit code 1 if it
    does not fit."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """The name of a published size, such as llama2-70b, a folder or its config.json, a .gguf file, or a Hugging Face
    id; no weights are needed."""
    topology: str
    """The pod: a generation, and its chips along each axis, such as v5p:2x2x4 or v5e:4x8."""
    task: Task
    """score: `ralm score`. encode: vectors of passages. finetune: a step that trains all of a reader's parameters, with
    float32 state."""
    window: int | None = None
    """Tokens a window. Default: 1024 for score, as far as the model has positions; else all its positions."""
    batch_size: int | None = None
    """Windows a step, of all devices. Default: the most that fit, to an eighth."""
    mesh: str | None = None
    """Sizes such as data=2,fsdp=4,tensor=1. Default: chosen; the first of the quick ones that fits."""
    dtype: ComputeDType = "bfloat16"
    """Of the computation; and of the weights, if they are not trained."""
    attention: Literal["auto", "xla", "splash"] = "auto"
    """What computes attention; auto takes splash where it can."""
    json: str | None = None
    """Also write the figures to this file."""

    def run(self) -> None:
        from ralm_jax.sharding import parse_mesh
        from ralm_jax.text import write_text

        check_output_file(self.json)
        at_least(1, window=self.window, batch_size=self.batch_size)
        mesh = None if self.mesh is None else parse_mesh(self.mesh)
        if importlib.util.find_spec("libtpu") is None:
            raise UsageError("libtpu, which compiles for TPUs, is not installed: pip install 'ralm-jax[plan]'")
        request = Request(
            self.model, self.topology, self.task, self.window, self.batch_size, mesh, self.dtype, self.attention
        )
        plan = ask(request)
        if self.json:
            write_text(self.json, json.dumps(plan.to_json(), indent=2) + "\n")
        print("\n".join(plan.lines()), flush=True)
        if not plan.fits:
            raise RalmError(
                f"{self.model} does not fit {self.topology}: about {plan.lacking:.2f} GiB a device too much"
            )


def ask(request: Request) -> Answer:
    """Has another process make the plan, and prints how it goes.

    Raises:
        RalmError: what went wrong there.
    """
    command = [sys.executable, "-m", "ralm_jax.cli_plan"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as chatter,
        subprocess.Popen(command, stderr=chatter, env=os.environ | ENVIRONMENT, **pipes) as child,
    ):
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(asdict(request)))
            child.stdin.close()
            for message in messages(child.stdout):
                if "plan" in message:
                    return Answer.from_json(message["plan"])
                if "error" in message:
                    raise UsageError(message["error"]) if message["exit_code"] == 2 else RalmError(message["error"])
                print(message["told"], flush=True)
            child.wait()
        finally:
            child.kill()
        chatter.seek(0)
        raise RalmError(f"the process that compiles ended with code {child.returncode}: {last_line(chatter.read())}")


def messages(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects among `lines`; what else libtpu prints is none."""
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"


def main() -> None:
    """The other process."""
    from ralm_jax.plan import MAKERS, make_plan
    from train.causal import finetune_program

    def tell(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    request = Request(**json.load(sys.stdin))
    try:
        plan = make_plan(request, MAKERS | {"finetune": finetune_program}, lambda line: tell(told=line))
    except RalmError as error:
        tell(error=str(error), exit_code=error.exit_code)
    else:
        tell(plan=plan.to_json())


if __name__ == "__main__":
    main()
