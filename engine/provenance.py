"""What a run was made with: commit, versions, and the part of the environment that decides how it behaves."""
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# By the beginnings of their names. Never the whole environment: that holds people's tokens, and the record is shared.
VARIABLES = ("OMP_", "GOMP_", "MKL_", "NCCL_", "TORCH", "CUDA_", "CUBLAS_", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "PYTHONHASHSEED")


def circumstances():
    """{"commit", "versions", "environment"} of this process."""
    # From the installed packages' records, so that nobody waits for an import of torch.
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {"commit": git_commit(), "versions": {"python": platform.python_version(), **packages}, "environment": variables}


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
