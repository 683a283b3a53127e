// The engine of WebAssembly: opens a program, and gives a function from inputs to results, both bytes by name.
async function openWebAssembly(program) {
  const power = (x, y) => (x === 1 || (x === -1 && (y === Infinity || y === -Infinity)) ? 1 : Math.pow(x, y));
  const env = {
    exp: Math.exp, log: Math.log, log2: Math.log2, sin: Math.sin, cos: Math.cos, tanh: Math.tanh, pow: power,
    exp2: (x) => Math.pow(2, x), fmod: (x, y) => x % y, fmodf: (x, y) => x % y,
  };
  const { instance } = await WebAssembly.instantiate(program.module, { env });
  const { memory, tessera_base, tessera_run } = instance.exports;
  const base = Number(tessera_base());
  const place = (p) => new Uint8Array(memory.buffer, base + p.offset, p.bytes);
  const of = (role) => program.parameters.filter((p) => p.role === role);
  for (const p of of("weight")) place(p).set(program.weights[p.name]);
  return async (inputs) => {
    for (const p of [...of("input"), ...of("scalar")]) place(p).set(inputs[p.name]);
    const code = tessera_run();
    if (code) throw new Error(program.errors[code] ?? `the program failed with ${code}`);
    return Object.fromEntries(program.parameters.filter((p) => p.written).map((p) => [p.name, place(p).slice()]));
  };
}
