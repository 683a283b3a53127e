// The engine of WebGPU: executes the launch plan of a program on the device, with all of its memory in one buffer.
async function openWebGpu(program, plan, shaders) {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error("this browser has no WebGPU adapter: choose another engine");
  const ALIGN = 256, MAX_GROUPS = 32768, MAX_ARENA_BYTES = 1 << 26;
  const roundUp = (n, to = ALIGN) => Math.ceil(n / to) * to;
  const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
  const bytes = program.parameters.map((p) => p.bytes);
  const offsets = [];
  let end = ALIGN;
  for (const count of bytes) { offsets.push(end); end += roundUp(count); }
  const workspace = end;
  const arena = workspace + roundUp(plan.workspace);
  const batches = Object.fromEntries(Object.entries(plan.scratch).map(
    ([name, count]) => [name, count ? Math.max(1, Math.floor(MAX_ARENA_BYTES / count)) : 2 ** 31]));
  const needed = plan.launches.map((e) => plan.scratch[e.kernel] * Math.min(product(e.grid), batches[e.kernel]));
  const size = arena + roundUp(Math.max(0, ...needed));
  if (size > adapter.limits.maxStorageBufferBindingSize) throw new Error(`the model needs ${size} bytes of memory`);
  const device = await adapter.requestDevice({
    requiredLimits: {
      maxStorageBufferBindingSize: adapter.limits.maxStorageBufferBindingSize,
      maxBufferSize: adapter.limits.maxBufferSize,
    },
  });
  const U = GPUBufferUsage;
  const memory = device.createBuffer({ size, usage: U.STORAGE | U.COPY_SRC | U.COPY_DST });
  const pipelines = {};
  for (const [name, code] of Object.entries(shaders)) {
    pipelines[name] = await device.createComputePipelineAsync({
      layout: "auto", compute: { module: device.createShaderModule({ code }), entryPoint: "main" },
    });
  }
  const write = (offset, data) => {
    const padded = new Uint8Array(roundUp(data.length, 4));
    padded.set(data);
    if (padded.length) device.queue.writeBuffer(memory, offset, padded);
  };
  const read = async (offset, count) => {
    const first = Math.floor(offset / 4) * 4, whole = roundUp(offset + count - first, 4);
    if (!count) return new Uint8Array(0);
    const copy = device.createBuffer({ size: whole, usage: U.COPY_DST | U.MAP_READ });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(memory, first, copy, 0, whole);
    device.queue.submit([encoder.finish()]);
    await copy.mapAsync(GPUMapMode.READ);
    const found = new Uint8Array(copy.getMappedRange()).slice(offset - first, offset - first + count);
    copy.destroy();
    return found;
  };
  const indices = {}, scalars = {};
  const locate = (a) => (a.moves ?? []).reduce((sum, [loop, step]) => sum + indices[loop] * step,
    ("param" in a ? offsets[a.param] : workspace) + (a.offset ?? 0));
  const word = (a) => ("value" in a ? a.value : a.param in scalars ? scalars[a.param] : locate(a));
  function dispatch(entry, start, count) {
    const [a, b, c, d = 1] = entry.grid;
    const words = [a, b, c, start, count, arena / 4, 0, d, ...entry.args.map(word)];
    while (words.length % 4) words.push(0);
    const uniform = device.createBuffer({ size: 4 * words.length, usage: U.UNIFORM | U.COPY_DST });
    device.queue.writeBuffer(uniform, 0, new Uint32Array(words));
    const pipeline = pipelines[entry.kernel];
    const group = device.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: [{ binding: 0, resource: { buffer: memory } }, { binding: 1, resource: { buffer: uniform } }],
    });
    const encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    const groups = Math.ceil(count / plan.workgroup);
    pass.dispatchWorkgroups(Math.min(groups, MAX_GROUPS), Math.ceil(groups / MAX_GROUPS), 1);
    pass.end();
    device.queue.submit([encoder.finish()]);
  }
  const holds = async (flag) => (await read(locate(plan.flags[flag]), 1))[0] !== 0;
  async function execute(steps) {
    for (const step of steps) {
      if ("run" in step) {
        for (const entry of plan.launches.slice(...step.run)) {
          const total = product(entry.grid), batch = batches[entry.kernel];
          for (let start = 0; start < total; start += batch) dispatch(entry, start, Math.min(batch, total - start));
        }
      } else if ("loop" in step) {
        for (let n = 0; n < step.count; n++) {
          indices[step.loop] = step.first + n * step.step;
          await execute(step.body);
        }
      } else if ("while" in step) {
        for (await execute(step.test); await holds(step.while); await execute(step.test)) await execute(step.body);
      } else {
        await execute((await holds(step.if)) ? step.then : step.else);
      }
    }
  }
  program.parameters.forEach((p, i) => p.role === "weight" && write(offsets[i], program.weights[p.name]));
  return async (inputs) => {
    device.pushErrorScope("validation");
    write(0, new Uint8Array(ALIGN));
    program.parameters.forEach((p, i) => {
      if (p.role === "output") write(offsets[i], new Uint8Array(p.bytes));
      if (p.role === "input" || p.role === "scalar") write(offsets[i], inputs[p.name]);
      if (p.role === "scalar") {
        const padded = new Uint8Array(8);
        padded.set(inputs[p.name]);
        scalars[i] = new Uint32Array(padded.buffer)[0];
      }
    });
    await execute(plan.steps ?? [{ run: [0, plan.launches.length] }]);
    const status = new Uint32Array((await read(0, 4)).buffer)[0];
    const error = await device.popErrorScope();
    if (error) throw new Error(error.message);
    const reasons = { 0xffffffff: "an integer does not fit in 32 bits", 0xfffffffe: "the driver ended a loop too early" };
    if (status) throw new Error(reasons[status] ?? "an index is out of bounds");
    const written = program.parameters.map((p, i) => [p, i]).filter(([p]) => p.written);
    return Object.fromEntries(await Promise.all(written.map(async ([p, i]) => [p.name, await read(offsets[i], p.bytes)])));
  };
}
