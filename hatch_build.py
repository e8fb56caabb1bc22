"""Build hook: compiles the CPU kernel when precache is installed. Without a C compiler the package is pure Python."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path("src/precache/ops/native/build.py")


class KernelHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = runpy.run_path(str(Path(self.root) / BUILD))
        try:
            library = builder["build"]()
        except builder["BuildError"] as error:
            self.app.display_warning(f"precache without its CPU kernel: {error}")
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
