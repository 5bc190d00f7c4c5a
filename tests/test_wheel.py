"""The wheel, as a user gets it: built, installed into a new environment, its configs found there."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import lightning_compress
from hydra import compose, initialize_config_module
from lightning_compress.recipe.load import config_dir
print(lightning_compress.__file__)
print(config_dir())
print(lightning_compress.load_recipe("w4a16_gptq").modifiers[0].scheme.weights.num_bits)
with initialize_config_module("lightning_compress.configs", version_base="1.3"):
    print(compose("compress", overrides=["recipe=w3a16_gptq"]).recipe.modifiers[0].scheme)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds the wheel; the dependencies come from this one's site-packages, to save the
    downloads."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "env/bin/python"),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert (site / "lightning_compress/py.typed").is_file()
    return folder / "env"


@pytest.mark.slow
def test_an_installed_wheel_finds_its_configs(environment: Path, tmp_path: Path) -> None:
    """Fails if the configs are left out of the wheel, or are found in the source checkout only."""
    done = subprocess.run(
        [environment / "bin/python", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    module, configs, num_bits, scheme = done.stdout.split()
    assert module.startswith(str(environment))
    assert configs.startswith(str(environment))
    assert (num_bits, scheme) == ("4", "W3A16")


@pytest.mark.slow
def test_the_console_script_of_the_wheel_lists_the_groups(environment: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [environment / "bin/lightning-compress", "compress", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "w4_mixed_w8" in done.stdout, done.stderr
