"""What a run was made with: commit, versions, and the part of the environment that decides how it behaves."""
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Named one by one, never the whole environment: that holds people's tokens, and it ends up in files that are shared.
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK",
             "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
             "PYTHONHASHSEED")
PREFIXES = ("NCCL_", "TORCH")


def environment():
    return {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES or name.startswith(PREFIXES)}


def versions():
    """Read from the installed packages' records, so that nobody waits for an import of torch."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def git_commit():
    """The checkout's commit, with '+' when tracked files differ from it; None outside a git checkout."""
    def git(*words):
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    if not (ROOT / ".git").exists():     # else it would be the commit of some outer repository
        return None
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None     # no git on this machine, or no commit yet: a run needs neither
