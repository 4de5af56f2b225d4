"""tpu_scripts: what they would run, that they run just that, and a whole job on a TPU that is made of folders."""

import os
import shlex
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tpu_scripts"
TPU = {"PROJECT": "a-project", "ZONE": "a-zone", "NAME": "a-tpu"}
AT = ["--project=a-project", "--zone=a-zone"]
SECRET = "hf_do_not_show_this"
COMMANDS = {  # script: flags, and words of the lines that it prints
    "create.sh": (
        ["--accelerator-type", "v5litepod-8"],
        [["tpu-vm", "create", "a-tpu", "--version=v2-alpha-tpuv5-lite", "--accelerator-type=v5litepod-8", *AT]],
    ),
    "create.sh queued": (
        ["--accelerator-type=v5p-16", "--queued", "--spot", "--", "--network=inner net"],
        [["queued-resources", "create", "a-tpu", "--node-id=a-tpu", "--runtime-version=v2-alpha-tpuv5",
          "--accelerator-type=v5p-16", "--spot", "--network=inner net", *AT]],
    ),
    "setup.sh": (
        ["--source", "https://example.org/ralm jax.git", "--ref", "main"],
        [["tpu-vm", "ssh", "a-tpu", "--worker=all",
          "--command=rm -rf ralm-jax && git clone --quiet --depth=1 --branch=main 'https://example.org/ralm jax.git' "
          "ralm-jax && ralm-jax/tpu_scripts/worker.sh install tpu,data", *AT]],
    ),
    "run.sh": (
        ["--pull", "gs://b/in put=in put", "--", "score", "--model", "a b", "--text", "it's", "--distributed"],
        [["tpu-vm", "ssh", "a-tpu", "--worker=all",
          "--command=ralm-jax/tpu_scripts/worker.sh start --pull 'gs://b/in put=in put' -- ralm score --model 'a b' "
          "--text 'it'\\''s' --distributed", *AT]],
    ),
    "run.sh stop": (
        ["--stop", "--worker=1"],
        [["tpu-vm", "ssh", "a-tpu", "--worker=1", "--command=ralm-jax/tpu_scripts/worker.sh stop", *AT]],
    ),
    "watch.sh": (
        ["--queued", "--lines", "3"],
        [["queued-resources", "describe", "a-tpu", "--format=value(state.state)", *AT],
         ["tpu-vm", "describe", "a-tpu", "--format=value(state,health)", *AT],
         ["tpu-vm", "ssh", "a-tpu", "--worker=all", "--command=ralm-jax/tpu_scripts/worker.sh log 3", *AT]],
    ),
    "delete.sh": (["--yes"], [["tpu-vm", "delete", "a-tpu", "--quiet", *AT]]),
    "delete.sh queued": (["--yes", "--queued"], [["queued-resources", "delete", "a-tpu", "--force", "--quiet", *AT]]),
}  # fmt: skip

RECORD = """#!/usr/bin/env bash
set -euo pipefail
echo "gcloud $(printf '%q ' "$@")" >>"$CLOUD/calls"
"""
# Buckets are folders, and so is the home folder of the one worker; it is taken away as the file `preempt` says.
GCLOUD = (
    f"""{RECORD}"""
    r"""
local_path() { echo "${1/#gs:\/\//$CLOUD/buckets/}"; }
on_worker() { (cd "$CLOUD/home" && HOME=$CLOUD/home HOSTNAME=t1v-n-0-w-0 bash -c "$1"); }
case "$*" in
  "compute tpus queued-resources list"*) cat "$CLOUD/state" 2>/dev/null || true ;;
  "compute tpus queued-resources create"*) echo ACTIVE >"$CLOUD/state"; mkdir "$CLOUD/home" ;;
  "compute tpus queued-resources delete"*) rm -r "$CLOUD/state" "$CLOUD/home" ;;
  "compute tpus tpu-vm scp"*) cp "$5" "$CLOUD/home/${6#*:}" ;;
  "compute tpus tpu-vm ssh"*)
    for word; do [[ $word != --command=* ]] || on_worker "${word#*=}"; done
    if [[ $* == *" start "* && -e $CLOUD/preempt ]]; then
      bash "$CLOUD/preempt"
      rm "$CLOUD/preempt"
      echo SUSPENDED >"$CLOUD/state"
    fi ;;
  "storage objects list"*) compgen -G "$(local_path "$4")" || true ;;
  "storage cp"*) cp "$(local_path "$3")" "$(local_path "$4")" ;;
  "storage rsync"*)
    from=$(local_path "$3") to=$(local_path "$4")
    [[ $* != *--delete* ]] || rm -rf "$to"
    mkdir -p "$to"
    cp -r "$from/." "$to" ;;
esac
"""
)
# What `curl … | sh` would install; it in turn installs a ralm of a few lines.
CURL = """#!/bin/sh
echo 'mkdir -p ~/.local/bin && cp "$CLOUD/bin/uv" ~/.local/bin/uv'
"""
UV = """#!/bin/sh
mkdir -p ~/ralm-jax/.venv/bin && cp "$CLOUD/bin/ralm" ~/ralm-jax/.venv/bin/ralm
"""
RALM = """#!/usr/bin/env bash
[[ $1 != --version ]] || exit 0
echo "ralm $*"
mkdir -p out && cd out
trap 'echo saved >checkpoint; exit 143' TERM
if [[ ! -e checkpoint && $1 == train ]]; then
  touch begun
  while true; do sleep 0.05; done
fi
echo "from $(cat checkpoint 2>/dev/null || echo nothing)" >result
"""


@pytest.fixture
def cloud(tmp_path):
    """A folder with `bin`, whose gcloud notes its calls in `calls`."""
    folder = tmp_path / "cloud"
    (folder / "bin").mkdir(parents=True)
    (folder / "buckets/b").mkdir(parents=True)
    for name, text in {"gcloud": GCLOUD, "curl": CURL, "uv": UV, "ralm": RALM}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def environment(cloud, **more):
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "TMPDIR", "LANG")}
    path = f"{cloud / 'bin'}:{os.environ['PATH']}"
    return kept | TPU | {"PATH": path, "CLOUD": str(cloud), "HF_TOKEN": SECRET, "PUSH_EVERY": "0.1"} | more


def run(script, *flags, cloud, **more):
    """The finished process of a script; its input is empty."""
    return subprocess.run(
        [SCRIPTS / script, *flags], env=environment(cloud, **more), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip


def calls(cloud):
    path = cloud / "calls"
    return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A git checkout with the scripts."""
    folder = tmp_path_factory.mktemp("a checkout")
    shutil.copytree(SCRIPTS, folder / "tpu_scripts")
    name = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "--quiet"], ["add", "."], [*name, "commit", "--quiet", "--message", "scripts"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_shellcheck():
    binary = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if binary is None:
        pytest.skip("needs shellcheck (the extra dev brings it)")
    files = [*SCRIPTS.glob("*.sh"), ROOT / ".ci/run"]
    told = subprocess.run([binary, "-x", "-P", "SCRIPTDIR", *files], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize("case", COMMANDS)
def test_a_dry_run_prints_what_a_run_does(case, cloud):
    script, (flags, expected) = case.split()[0], COMMANDS[case]
    dry = run(script, "--dry-run", *flags, cloud=cloud)
    assert (dry.returncode, dry.stderr) == (0, "")
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert printed == [["gcloud", "compute", "tpus", *words] for words in expected]
    assert calls(cloud) == []
    (cloud / "bin/gcloud").write_text(RECORD)
    assert run(script, *flags, cloud=cloud).returncode == 0
    assert calls(cloud) == printed


def test_every_script_has_help_and_a_dry_run(cloud):
    for path in SCRIPTS.glob("*.sh"):
        if path.name == "common.sh":
            continue
        told = run(path.name, "--help", cloud=cloud)
        assert (told.returncode, told.stderr) == (0, ""), path
        assert ("--dry-run" in told.stdout) == (path.name != "worker.sh")
    assert calls(cloud) == []


def test_no_secret_is_shown(cloud, tmp_path, checkout):
    token = tmp_path / "token"
    token.write_text(SECRET)
    flags = ["--source", checkout, "--token-file", token]
    dry = run("setup.sh", "--dry-run", *flags, cloud=cloud)
    assert dry.returncode == 0
    assert str(token) in dry.stdout
    assert SECRET not in dry.stdout + dry.stderr
    (cloud / "home").mkdir()
    real = run("setup.sh", *flags, cloud=cloud)
    assert real.returncode == 0, real.stderr
    assert SECRET not in real.stdout + real.stderr + (cloud / "calls").read_text()
    copied = cloud / "home/.cache/huggingface/token"
    assert copied.read_text() == SECRET
    assert copied.stat().st_mode & 0o077 == 0
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [line for line in printed if line[0] == "gcloud"] == calls(cloud)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("create.sh", "--accelerator-type (or ACCELERATOR_TYPE) is missing"),
        ("create.sh --accelerator-type v9-8", "v9-8: name its runtime with --version"),
        ("create.sh --accelerator-type v4-8 --spot --reserved", "--spot and --reserved exclude each other"),
        ("create.sh --accelerator-type", "--accelerator-type needs a value"),
        ("create.sh --zone --spot", "--zone needs a value"),
        ("setup.sh --spot", "--spot: unknown; --help tells what there is"),
        (
            "setup.sh --source https://me:word@example.org/x",
            "--source must not hold a password",
        ),
        ("setup.sh --source /nowhere", "/nowhere: not a git checkout"),
        ("setup.sh --token-file /nowhere", "/nowhere: no such file"),
        ("run.sh", "the command is missing: -- score --model ..."),
        ("run.sh score", "score: unknown"),
        ("run.sh --sync gs://b -- score", "--sync gs://b: is not gs://BUCKET/PATH=FOLDER"),
        ("watch.sh --lines many", "--lines many: is not a number"),
        ("delete.sh", "not asked; add --yes"),
        ("keep_running.sh --accelerator-type v4-8 -- score --overwrite", "--overwrite would begin anew"),
        ("keep_running.sh -- score", "--accelerator-type (or ACCELERATOR_TYPE) is missing"),
    ],
)
def test_what_cannot_be_is_one_line(command, complaint, cloud):
    script, *flags = command.split()
    told = run(script, *flags, cloud=cloud)
    assert told.returncode == 2
    assert complaint in told.stderr
    assert told.stderr.count("\n") == 1
    assert calls(cloud) == []


@pytest.mark.parametrize("name", TPU)
def test_the_tpu_must_be_named(name, cloud):
    told = run("watch.sh", cloud=cloud, **{name: ""})
    assert told.returncode == 2
    assert f"(or {name}) is missing" in told.stderr


class TestWorker:
    def home(self, cloud):
        home = cloud / "home"
        shutil.copytree(SCRIPTS, home / "ralm-jax/tpu_scripts")
        (home / "ralm-jax/.venv/bin").mkdir(parents=True)
        shutil.copy(cloud / "bin/ralm", home / "ralm-jax/.venv/bin/ralm")
        return home

    def until(self, ready, what):
        for _ in range(400):
            if ready():
                return
            time.sleep(0.05)
        raise AssertionError(what())

    def worker(self, cloud, *words, number=0):
        env = environment(cloud, HOME=str(cloud / "home"), HOSTNAME=f"t1v-n-0-w-{number}")
        script = cloud / "home/ralm-jax/tpu_scripts/worker.sh"
        return subprocess.run([script, *words], env=env, capture_output=True, text=True, timeout=60, check=False)

    def status(self, cloud):
        return self.worker(cloud, "status").stdout.strip()

    def test_a_command_is_stopped_saves_and_goes_on_elsewhere(self, cloud):
        home, bucket = self.home(cloud), cloud / "buckets/b"
        start = ["start", "--sync", "gs://b/a run/=out", "--", "ralm", "train", "a  b"]
        assert self.status(cloud) == "worker 0: none"
        assert self.worker(cloud, *start).returncode == 0
        log = lambda: self.worker(cloud, "log", "20").stdout  # noqa: E731
        self.until((bucket / "a run/begun").exists, log)  # copied while it runs
        assert self.status(cloud) == "worker 0: running"
        assert "runs already" in self.worker(cloud, *start).stderr
        self.worker(cloud, "stop")
        self.until(lambda: self.status(cloud) == "worker 0: exit 143", log)
        assert "ralm train a  b" in log()
        assert (bucket / "a run/checkpoint").read_text() == "saved\n"
        (bucket / "a run/half").mkdir()  # of a copy that was cut off
        (bucket / "a run/half/checkpoint").touch()

        shutil.rmtree(home)
        self.home(cloud)
        self.worker(cloud, *start)
        self.until(lambda: self.status(cloud) == "worker 0: exit 0", log)
        assert (home / "out/result").read_text() == "from saved\n"
        assert not (home / "out/half").exists()
        assert (bucket / "a run/result").read_text() == "from saved\n"
        assert not (bucket / "a run/half").exists()

    def test_inputs_are_copied_and_only_the_first_worker_writes_back(self, cloud):
        home, bucket = self.home(cloud), cloud / "buckets/b"
        (bucket / "data").mkdir()
        (bucket / "data/text").touch()
        self.worker(cloud, "start", "--pull", "gs://b/data=in put", "--sync", "gs://b/out=out", "--", "ralm", "score",
                    number=1)  # fmt: skip
        self.until((home / "ralm-job/exit").exists, lambda: self.worker(cloud, "log", "20").stdout)
        assert (home / "ralm-job/exit").read_text() == "0\n"
        assert (home / "in put/text").exists()
        assert (home / "out/result").exists()
        assert not (bucket / "out").exists()

    def test_a_command_that_fails_and_a_machine_that_restarted(self, cloud):
        home = self.home(cloud)
        self.worker(cloud, "start", "--", "false")
        self.until((home / "ralm-job/exit").exists, lambda: self.status(cloud))
        assert self.status(cloud) == "worker 0: exit 1"
        (home / "ralm-job/exit").unlink()
        self.until(lambda: self.status(cloud) == "worker 0: gone", lambda: self.status(cloud))


class TestKeepRunning:
    def start(self, cloud, checkout, *flags):
        command = [SCRIPTS / "keep_running.sh", "--accelerator-type=v6e-8", "--spot", "--every=0", "--source", checkout]
        env = environment(cloud)
        return subprocess.run(
            [*command, *flags], env=env, capture_output=True, text=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def verbs(self, cloud):
        """What was done to the TPU, in order."""
        return [call[4] for call in calls(cloud) if call[3] == "queued-resources" and call[4] != "list"]

    def test_it_goes_on_after_a_preemption(self, cloud, checkout):
        """The first TPU is taken away once training has begun: it saves, and the second goes on from there."""
        home = cloud / "home"
        (cloud / "preempt").write_text(
            f"cd {home}; until [[ -e out/begun ]]; do sleep 0.05; done; kill -TERM $(<ralm-job/pid)\n"
            "until [[ -e ralm-job/exit ]]; do sleep 0.05; done\n"
        )
        told = self.start(cloud, checkout, "--delete", "--sync", "gs://b/run=out", "--", "train", "--out", "out")
        assert told.returncode == 0, told.stdout + told.stderr
        assert self.verbs(cloud) == ["create", "delete", "create", "delete"]
        assert "was taken away" in told.stdout
        assert (cloud / "buckets/b/run/result").read_text() == "from saved\n"
        starts = [word for call in calls(cloud) for word in call if " start " in word]
        assert len(starts) == 2
        assert all(line.endswith("-- ralm train --out out --resume") for line in starts)
        assert SECRET not in told.stdout + told.stderr + (cloud / "calls").read_text()

    def test_a_request_that_cannot_be_met_is_not_repeated(self, cloud, checkout):
        (cloud / "bin/ralm").write_text('#!/bin/sh\n[ "$1" = --version ] || exit 2\n')
        assert self.start(cloud, checkout, "--", "score").returncode == 2
        assert self.verbs(cloud) == ["create"]

    def test_a_command_that_fails_is_started_again_so_many_times(self, cloud, checkout):
        (cloud / "bin/ralm").write_text('#!/bin/sh\n[ "$1" = --version ] || exit 1\n')
        assert self.start(cloud, checkout, "--tries=1", "--", "score").returncode == 1
        starts = [word for call in calls(cloud) for word in call if " start " in word]
        assert len(starts) == 2

    def test_the_dry_run_is_one_round(self, cloud, checkout):
        told = self.start(cloud, checkout, "--dry-run", "--", "score", "--resume")
        assert told.returncode == 0, told.stderr
        lines = [shlex.split(line) for line in told.stdout.splitlines()]
        assert [line[4] for line in lines if line[0] == "gcloud"] == [
            "create", "list", "scp", "ssh", "ssh", "ssh", "delete",
        ]  # fmt: skip
        assert told.stdout.count("--resume") == 1
        assert calls(cloud) == []
