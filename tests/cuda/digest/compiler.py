"""A process that compiles the kernel for a GPU that is not there, and looks at what comes out."""

import os
import re
import subprocess
from typing import Any

__all__ = ["Compiler"]

_ARGUMENTS = {"rows": "*i64", "keys": "*i64", "out": "*i64", "source": "i64"}
_ARGUMENTS |= {"target": "i64", "numbers": "*i64"}
_CHOICES = ("COPY", "WIDTH", "LOOK")
_TIMEOUT_S = 60.0


class Compiler:
    """Compiles `_kernel.digest_leaves` with Triton's own assembler; served by a child."""

    def __init__(self, folder: str) -> None:
        # Before Triton is imported: what other runs compiled is not looked at.
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ.pop("TRITON_INTERPRET", None)

    def lacks(self) -> str | None:
        """What is missing for compiling, or None."""
        try:
            subprocess.run(
                [_assembler(90), "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True
            )
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            return f"no assembler of Triton's: {type(error).__name__}: {error}"
        return None

    def compiled(self, copy: bool, width: int, capability: int, look: int) -> dict[str, Any]:
        """Registers, spills, instructions and types of one variant."""
        import triton
        from triton.backends.compiler import GPUTarget

        from rl_bridge.cuda._kernel import digest_leaves
        from rl_bridge.cuda.leaves import most_registers

        names = list(_ARGUMENTS)
        source = triton.compiler.ASTSource(
            fn=digest_leaves,
            signature=_ARGUMENTS | dict.fromkeys(_CHOICES, "constexpr"),
            constexprs={(len(names) + i,): value for i, value in enumerate((copy, width, look))},
            attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5)},
        )
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(
            source,
            target=target,
            options={"num_warps": 1, "maxnreg": most_registers(width, look)},
        )
        ptx, ttir = made.asm["ptx"], made.asm["ttir"]
        return {
            "wide_loads": len(re.findall(r"ld\.global\S*\.v2\.b64|ld\.global\S*\.v4\.b32", ptx)),
            "wide_stores": len(re.findall(r"st\.global\S*\.v2\.b64|st\.global\S*\.v4\.b32", ptx)),
            "shared": len(re.findall(r"(?:ld|st)\.shared|bar\.sync", ptx)),
            "signed_shifts": len(re.findall(r"arith\.shrsi", ttir)),
            # Places are scalars; what is cut to 32 bits on purpose are tensors, of words' halves.
            "narrowed": re.findall(r"arith\.trunci .* : i64 to i32", ttir),
            "narrow_products": re.findall(r"arith\.muli .* : i32(?: loc|$)", ttir, re.MULTILINE),
        } | self._resources(ptx, capability)

    @staticmethod
    def _resources(ptx: str, capability: int) -> dict[str, int]:
        """What the assembler says of registers and spills."""
        target = re.search(r"\.target (sm_\w+)", ptx)
        assert target
        done = subprocess.run(
            [_assembler(capability), "-v", f"--gpu-name={target[1]}", "-o", os.devnull, "-"],
            input=ptx,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
        registers = re.search(r"Used (\d+) registers", done.stderr)
        assert spills, done.stderr
        assert registers, done.stderr
        return {
            "stack": int(spills[1]),
            "spilled": int(spills[2]),
            "registers": int(registers[1]),
        }


def _assembler(capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(capability).path)
