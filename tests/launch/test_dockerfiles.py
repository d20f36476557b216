"""Images, as far as no engine is needed: layers, user, devices; and the ROCm image's guard, whose steps run here."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.source import ROOT
from tests.support.dockerfile import Build, BuildError, Stage, stages
from tests.support.wheels import wheel
from tools.check_environment import asked

DOCKER = ROOT / "launch" / "docker"
RUNGS = ("cpu", "cuda", "rocm")
NEEDED = {"/asked", "constraints.txt", "tools/set_up.sh", "tools/check_environment.py"}
HEAVY = re.compile(r"set_up\.sh|pip install(?!.* --no-deps)|apt-get")
# build_tools/utils.py of Transformer Engine 2.11, cuda_archs(), where CUDA is 13.0 or newer.
TE_ARCHS = "75;80;89;90;100;120"


def dockerfile(rung: str) -> list[Stage]:
    return stages((DOCKER / f"Dockerfile.{rung}").read_text(encoding="utf-8"))


def copied_before_heavy(stage: Stage) -> list[str]:
    """What is copied before the last heavy step."""
    last = max(number for number, (name, rest) in enumerate(stage.steps) if name == "RUN" and HEAVY.search(rest))
    words = [rest.split()[:-1] for name, rest in stage.steps[:last] if name == "COPY"]
    return [word for each in words for word in each if not word.startswith("--from=")]


@pytest.mark.parametrize("rung", RUNGS)
def test_an_edit_of_ours_repeats_no_heavy_step(rung: str) -> None:
    system, dependencies, image = dockerfile(rung)
    assert (dependencies.base, image.base) == ("system", "system")
    assert not any(name == "COPY" for name, _ in system.steps), "packages of the system depend on nothing of ours"
    assert set(copied_before_heavy(image)) <= NEEDED
    assert not any(name == "RUN" and HEAVY.search(rest) for name, rest in dependencies.steps)
    after = image.steps[image.steps.index(("COPY", ". .")) :]
    assert "pip install --quiet --no-deps --no-build-isolation --editable ." in str(after), "our own name and version"


def test_a_heavy_step_after_our_files_is_seen() -> None:
    text = (DOCKER / "Dockerfile.cpu").read_text().replace("--no-deps", "")
    assert "." in copied_before_heavy(stages(text)[-1])


@pytest.mark.parametrize("rung", RUNGS)
def test_what_the_heavy_layer_reads_of_pyproject_is_what_pip_is_asked_for(rung: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    read, project = tomllib.loads(asked(rung, text)), tomllib.loads(text)["project"]
    assert set(read["project"]["dependencies"]) == set(project["dependencies"])
    assert set(read["project"]["optional-dependencies"][rung]) == set(project["optional-dependencies"][rung])
    assert read["build-system"] == tomllib.loads(text)["build-system"]
    assert Requirement(read["project"]["dependencies"][0])
    light = (
        text.replace("line-length = 120", "line-length = 100").replace("Megatron-core, ", "").replace("Alpha", "Beta")
    )
    light = light.replace("# tools", "# other").replace('"pytest==9.2.0"', '"pytest==9.3.0"')
    assert light != text and asked(rung, light) == asked(rung, text)
    heavy = text.replace("torch==2.13.0", "torch==2.14.0")
    assert asked(rung, heavy) != asked(rung, text)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_image_runs_as_whoever_it_is_called_by(rung: str) -> None:
    system, _, image = dockerfile(rung)
    made = " ".join(rest for name, rest in system.steps if name == "RUN")
    assert "install --directory --mode=1777 /home/mcore_rl /home/mcore_rl/.cache" in made
    (user,) = [rest for name, rest in image.steps if name == "USER"]
    number = re.fullmatch(r"(\d+):(\d+)", user)  # a number: Kubernetes' runAsNonRoot reads no names
    assert number and f"--uid {number[1]} " in made and int(number[1]) >= 1000
    assert image.steps.index(("USER", user)) > max(i for i, (name, _) in enumerate(image.steps) if name == "RUN")
    assert [rest for name, rest in image.steps if name == "WORKDIR"][-1] == "/home/mcore_rl", "runs/ is made here"
    environment = dict(word.split("=", 1) for name, rest in image.steps if name == "ENV" for word in rest.split())
    assert environment["HOME"] == "/home/mcore_rl", "docker's --user 1234 has none else"
    assert environment["LOGNAME"], "getpass.getuser() of a user without a name: KeyError"


def test_the_lists_of_devices_are_the_same_and_what_transformer_engine_takes() -> None:
    arguments = dict(rest.partition("=")[::2] for name, rest in dockerfile("cuda")[-1].steps if name == "ARG")
    ours = arguments["NVTE_CUDA_ARCHS"].strip('"').split(";")
    assert {"80", "90", "100"} <= set(ours) <= set(TE_ARCHS.split(";"))
    torch = [each.replace(".", "") for each in arguments["TORCH_CUDA_ARCH_LIST"].strip('"').split(";")]
    assert torch == ours


# ---- what the steps do, where they run without an engine ----


@dataclass
class Image:
    """The ROCm image, built in a folder: on a base with a torch from a file, beside an index that has the next one."""

    folder: Path

    @property
    def index(self) -> Path:
        return self.folder / "index"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def build(self, *dependencies: str, transformer_engine: str = "", guarded: bool = True) -> Build:
        """From the beginning, with these dependencies of ours.  guarded: whether what is there is compared at all."""
        context = self.folder / "context"
        for name in ("tools/check_environment.py", "mcore_rl/__init__.py", "README.md", "LICENSE"):
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, context / name)
        text = (ROOT / "pyproject.toml").read_text()
        theirs = re.sub(r"^dependencies = \[.*?^\]", f"dependencies = {list(dependencies)}", text, flags=re.M | re.S)
        (context / "pyproject.toml").write_text(theirs)
        text = (DOCKER / "Dockerfile.rocm").read_text()
        assert text.count(GUARD) == 3, "after every pip"
        _, asks, image = stages(text if guarded else text.replace(GUARD, "true"))
        environment = {
            "PATH": f"{self.folder}/venv/bin:/usr/bin:/bin",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
        }
        shutil.rmtree(self.root, ignore_errors=True)
        build = Build(self.root, context, environment, {"TRANSFORMER_ENGINE": transformer_engine})
        build.run(asks)
        build.run(image)
        return build

    def python(self, code: str) -> str:
        """What it prints in the image."""
        command = [self.folder / "venv" / "bin" / "python3", "-c", code]
        done = subprocess.run(command, cwd="/", env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def torch(self) -> str:
        return self.python("from importlib import metadata; print(metadata.version('torch'))")


GUARD = "python3 tools/check_environment.py unchanged kept.txt"
HIP = {"torch/__init__.py": "from . import version\n", "torch/version.py": "cuda = None\nhip = '7.1'\n"}
THEIRS = "2.13.0+git733fca1"


@pytest.fixture
def image(tmp_path: Path) -> Image:
    made = Image(tmp_path)
    made.index.mkdir()
    wheel(made.index, "torch", "2.14.0")
    wheel(made.index, "allows_it", "1", "torch==2.13.0")
    wheel(made.index, "wants_more", "1", "torch>=2.14")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    theirs = Path(site.getsitepackages()[0])
    for name in ("pip", "setuptools", "pkg_resources", "_distutils_hack"):
        for each in [theirs / name, *theirs.glob(f"{name}-*.dist-info")]:
            shutil.copytree(each, packages / each.name)
    base = tmp_path / "base"
    base.mkdir()
    wheel(base, "torch", THEIRS, files=HIP)
    with zipfile.ZipFile(next(base.iterdir())) as archive:  # as pip does, with a list of files
        archive.extractall(packages)
    return made


@pytest.mark.tier("ci")
def test_the_rocm_image_keeps_the_torch_of_its_base(image: Image) -> None:
    build = image.build("allows_it")
    assert image.torch() == THEIRS
    where = image.python("import mcore_rl; print(mcore_rl.__file__, mcore_rl.__version__)")
    assert where.split()[0] == f"{image.root}/mcore_rl/mcore_rl/__init__.py"
    named = image.python("from importlib import metadata; print(metadata.version('mcore_rl'))")
    assert named == where.split()[1], "the version is the real one, not that of the heavy layer"
    pip = [image.folder / "venv" / "bin" / "python3", "-m", "pip", "install", "wants_more"]
    done = subprocess.run(pip, env=build.environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and THEIRS in done.stdout + done.stderr, "in the container, too"
    assert image.torch() == THEIRS
    environment = {name: value for name, value in build.environment.items() if name != "PIP_CONSTRAINT"}
    subprocess.run(pip, env=environment, capture_output=True, check=True)
    assert image.torch() == "2.14.0", "without the constraint pip takes the index's: the test guards something"


@pytest.mark.tier("ci")
def test_a_dependency_that_needs_another_torch_ends_the_build_and_replaces_nothing(image: Image) -> None:
    with pytest.raises(BuildError) as error:
        image.build("wants_more")
    assert "pip install --no-cache-dir" in str(error.value) and f"torch=={THEIRS}" in str(error.value)
    assert image.torch() == THEIRS


@pytest.mark.tier("ci")
def test_what_replaces_torch_behind_pip_s_back_ends_the_build(image: Image) -> None:
    """A build script that calls a pip of its own, as some do."""
    source = image.folder / "engine"
    source.mkdir()
    (source / "setup.py").write_text(
        "import os, subprocess, sys\n"
        "from setuptools import setup\n"
        "os.environ.pop('PIP_CONSTRAINT', None)\n"
        "subprocess.run([sys.executable, '-m', 'pip', 'install', 'torch==2.14.0'], check=True)\n"
        "setup(name='engine', version='1', py_modules=[])\n"
    )
    with pytest.raises(BuildError) as error:
        image.build("allows_it", transformer_engine=str(source))
    assert f"torch=={THEIRS} became torch==2.14.0" in str(error.value)


@pytest.mark.tier("full")
def test_another_build_of_the_same_version_ends_the_build(image: Image) -> None:
    """An index may have a CUDA build under the very same version."""
    other = image.folder / "other"
    other.mkdir()
    wheel(other, "torch", THEIRS, files={**HIP, "torch/cuda.txt": "sm_90"})
    source = image.folder / "engine"
    source.mkdir()
    (source / "setup.py").write_text(
        "import subprocess, sys\n"
        "from setuptools import setup\n"
        f"command = ['-m', 'pip', 'install', '--force-reinstall', '--no-deps', r'{next(other.iterdir())}']\n"
        "subprocess.run([sys.executable, *command], check=True, env={'PATH': '/usr/bin'})\n"
        "setup(name='engine', version='1', py_modules=[])\n"
    )
    with pytest.raises(BuildError, match="became another build of that version"):
        image.build("allows_it", transformer_engine=str(source))
    image.build("allows_it", transformer_engine=str(source), guarded=False)
    there = "import pathlib, torch; print(pathlib.Path(torch.__file__).with_name('cuda.txt').exists())"
    assert image.python(there) == "True", "without the comparison nobody notices"
