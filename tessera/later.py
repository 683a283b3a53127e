"""What `tessera` imports when it is first asked for: most programs need none of it, and all would wait for it."""

# Names by module.
LATER = {
    "tessera.artifacts": "build load",
    "tessera.checking": "check",
    "tessera.determinism": "deterministic verify_determinism",
    "tessera.flow": (
        "accumulate_grad cond diff_through_opt fold fori_loop gradient_accumulation implicit_diff map optimize "
        "per_example_grad scan while_loop"
    ),
    "tessera.functional": (
        "Just Maybe Nothing compose current_device curry function maybe memoize persistent_cache pipe polymorphic "
        "specialize_for"
    ),
    "tessera.kernel.placement": "memory",
    "tessera.kernel.tuning.search": "Autotuner Evolutionary Guided",
    "tessera.kernel.streams": "Event Stream synchronize",
    "tessera.kernel.tuning.cache": "TuningCache",
    "tessera.storage.pipelines": "async_load async_store",
    "tessera.performance": "EmpiricalModel PerformanceModel RooflineModel time",
}
# Modules, by the names that users have for them.
MODULES = {name: f"tessera.{name}" for name in ("debug", "linalg", "ml", "random", "verify")} | {
    "tile": "tessera.kernel.tile"
}
HOMES = {name: module for module, names in LATER.items() for name in names.split()}
# What a module calls otherwise.
RENAMED = {"map": "map_"}
