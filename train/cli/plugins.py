"""JAX's plugin for NVIDIA GPUs, kept out of processes on machines without one.

The extra `preflight` installs the plugin for its compiler. Without a driver its shared
libraries print warnings when jax is imported, and jax prints a traceback when its
first device is used, whatever the platform that the process asked for. No option of
jax, XLA or absl turns this off: the libraries print before any of these is set up. So
the modules are hidden until `reveal_cuda_plugin`.
"""

import os
import sys
import types

# The plugin proper, and the modules that jaxlib imports with jax itself.
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_EXTENSIONS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Where jax itself looks for a GPU: the first, containers, and WSL2.
_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
_hidden: dict[str, types.ModuleType | None] = {}


def hide_cuda_plugin() -> None:
    """Hides the plugin from jax on a machine without an NVIDIA GPU.

    It does nothing where jax is already imported, or where JAX_PLATFORMS asks for a
    GPU: then the plugin's messages are wanted.
    """
    asked = {"cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "").split(","))
    if asked or "jax" in sys.modules or any(map(os.path.exists, _DEVICES)):
        return
    for name in _PLUGINS:
        # jax calls `initialize` of each plugin that is installed, and warns where the
        # import fails, so a module that registers nothing takes its place.
        stub: types.ModuleType = types.ModuleType(name)
        vars(stub)["initialize"] = lambda: None
        _hidden[name] = stub
    _hidden.update(dict.fromkeys(_EXTENSIONS))  # None: Python takes it as missing.
    sys.modules.update(_hidden)  # type: ignore[arg-type]


def reveal_cuda_plugin() -> None:
    """Lets jax find the plugin after all, to compile; before the first device is used.

    jax looks for plugins once, when it makes its first device or topology.
    """
    for name in _hidden:
        sys.modules.pop(name, None)
    _hidden.clear()
