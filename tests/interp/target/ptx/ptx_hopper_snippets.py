"""PTX snippets for Hopper: a tile copied to shared memory by tensor map, and one warpgroup's wgmma on it."""

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 dyn[];\n"
LOAD = "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group"


def entry(params, lines, directives=""):
    """An entry whose maps have generic addresses %m0, %m1, ... and pointers lie in %p0, %p1, ..."""
    declared = ", ".join(
        f".param .align 64 .b8 a{i}[128]" if kind == "map" else f".param .u64 a{i}" for i, kind in enumerate(params)
    )
    first = "\n".join(
        f"mov.b64 %m{i}, a{i}; cvta.param.u64 %m{i}, %m{i};" if kind == "map" else f"ld.param.u64 %p{i}, [a{i}];"
        for i, kind in enumerate(params)
    )
    return f"""{HEAD}.visible .entry k({declared}) {directives}
{{
.reg .b64 %m<8>, %p<8>, %d<8>; .reg .b32 %i, %s, %bar, %t, %r<32>; .reg .pred %first, %q<4>; .reg .b32 %f<256>;
{first}
mov.u32 %i, %tid.x; mov.u32 %s, dyn; mov.u32 %bar, dyn; add.u32 %s, %s, 1024; setp.eq.u32 %first, %i, 0;
{lines}
ret;
}}
"""


def barrier(count=1):
    """An mbarrier at %bar."""
    return f"""@%first mbarrier.init.shared::cta.b64 [%bar], {count};
@%first fence.mbarrier_init.release.cluster;
bar.sync 0;"""


def wait(parity=0, at="%bar", name="W"):
    """Wait for a phase."""
    return f"""{name}: mbarrier.try_wait.parity.shared::cta.b64 %q0, [{at}], {parity};
@!%q0 bra {name};"""


def load(boxes, bytes):
    """The first thread loads boxes, each (map, offset, coordinates), and all wait."""
    n = len(boxes[0][2])
    copies = "\n".join(
        f"add.u32 %t, %s, {offset}; @%first {LOAD.format(n=n)} [%t], [%m{m}, {{{', '.join(map(str, at))}}}], [%bar];"
        for m, offset, at in boxes
    )
    return f"""@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes};
{copies}
{wait()}"""
