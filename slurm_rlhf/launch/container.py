"""Put the ranks into a container, with the conductor outside it: the words before a rank's command."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.schema import Config

PYXIS = "pyxis"


@dataclass(frozen=True, slots=True)
class Container:
    """Say where Python runs on the nodes: by default outside any container, with the conductor's own interpreter."""

    image: str = ""
    runtime: str = ""  # apptainer, singularity, pyxis
    mounts: tuple[str, ...] = ()  # host path, or host path:path inside
    python: str = sys.executable

    def command(self, module: str, *arguments: str, gpus: bool) -> list[str]:
        """Return the command that runs `module` on a node; `gpus`: make them visible in the container."""
        inner = [self.python, "-m", module, *arguments]
        if self.runtime in ("", PYXIS):
            return inner
        binds = [f"--bind={mount}" for mount in self.mounts]
        return [self.runtime, "exec", *(["--nv"] if gpus else []), *binds, self.image, *inner]

    def step_options(self) -> tuple[str, ...]:
        """Return the options of srun itself: pyxis is a plugin of it, which makes GPUs visible by itself."""
        if self.runtime != PYXIS:
            return ()
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in self.mounts)
        return (f"--container-image={self.image}", f"--container-mounts={mounts}")


HOST = Container()


def container_of(config: Config) -> Container:
    """Read the keys `slurm.container...`. Mounts the run directory, the models and what the user adds."""
    slurm = config.slurm
    if not slurm.container:
        return HOST
    own = [config.run_dir, *(get(config, name) for name in all_keys() if name.endswith(".model_name_or_path"))]
    mounts = tuple(dict.fromkeys([*filter(None, own), *slurm.container_mounts]))
    return Container(slurm.container, slurm.container_runtime, mounts, slurm.container_python)
