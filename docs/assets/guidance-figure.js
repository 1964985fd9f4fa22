// A figure that one can move: attention over slices, the normal with its mean and variance, and three divergences.
// The arithmetic is that of normal_guidance.normal_reference and normal_guidance.divergence, in float64;
// tests/test_site.py compares the numbers.
(() => {
  const SLICES = 24;
  const LEAST = 0.001; // the lowest bar that a hand can draw: logarithms need more than 0
  const VARIANCE_FLOOR = 1e-6;
  const TINY = 2.2250738585072014e-308;

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const log = (value) => Math.log(Math.max(value, TINY));

  function measure(weights) {
    const total = sum(weights);
    const attention = weights.map((weight) => weight / total);
    const mean = sum(attention.map((a, j) => (j + 1) * a));
    const spread = sum(attention.map((a, j) => (j + 1 - mean) ** 2 * a));
    const variance = Math.max(spread, VARIANCE_FLOOR);
    const logs = attention.map((_, j) => -((j + 1 - mean) ** 2) / (2 * variance));
    const highest = Math.max(...logs);
    const scale = sum(logs.map((value) => Math.exp(value - highest)));
    const reference = logs.map((value) => Math.exp(value - highest) / scale);
    const over = (term) => sum(attention.map((a, j) => term(reference[j], a)));
    return {
      attention,
      reference,
      mean,
      sd: Math.sqrt(variance),
      forward_kl: over((r, a) => r * (log(r) - log(a))),
      reverse_kl: over((r, a) => a * (log(a) - log(r))),
      squared_error: over((r, a) => (r - a) ** 2),
    };
  }

  const bell = (middle, width) => (j) => Math.exp(-((j - middle) ** 2) / (2 * width ** 2));
  const noise = (j) => 0.15 + 0.85 * Math.abs(Math.sin(12.9898 * (j + 1)) * Math.cos(78.233 * (j + 1)));
  const STARTS = {
    "Two peaks": (j) => bell(5, 1.5)(j) + 0.7 * bell(16, 2)(j),
    "One bell": bell(9, 2.5),
    "One slice": (j) => (j === 13 ? 1 : 0),
    Flat: () => 0.5,
    Noise: noise,
  };

  function build(place) {
    let weights = [];
    const width = 720, height = 266, floor = 232, room = 210, step = width / SLICES;
    const svg = (name, attributes, parent) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      parent?.append(element);
      return element;
    };
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "moved", role: "group" });
    drawing.setAttribute("aria-label", "Attention over 24 slices; arrow keys choose a slice and change it");
    const bars = Array.from({ length: SLICES }, (_, j) =>
      svg("rect", { class: "bar", x: j * step + 2, width: step - 4, rx: 2, tabindex: j ? -1 : 0, role: "slider",
                    "aria-label": `slice ${j + 1}`, "aria-valuemin": 0, "aria-valuemax": 100 }, drawing));
    svg("line", { class: "floor", x1: 0, x2: width, y1: floor, y2: floor }, drawing);
    for (const j of [1, 6, 12, 18, 24]) {
      svg("text", { class: "number", x: (j - 0.5) * step, y: floor + 24 }, drawing).textContent = j;
    }
    const curve = svg("polyline", { class: "reference" }, drawing);
    const answers = document.createElement("dl");
    answers.className = "answers";
    answers.setAttribute("aria-live", "polite");
    const shown = {};
    const names = { forward_kl: "forward KL", reverse_kl: "reverse KL", squared_error: "squared error", mean: "mean slice",
                    sd: "standard deviation" };
    for (const [key, name] of Object.entries(names)) {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
      shown[key] = pair.appendChild(document.createElement("dd"));
      shown[key].dataset.value = key;
      answers.append(pair);
    }

    function show() {
      const found = measure(weights);
      const total = sum(weights);
      weights.forEach((weight, j) => {
        const high = Math.max(2, weight * room);
        bars[j].setAttribute("y", floor - high);
        bars[j].setAttribute("height", high);
        bars[j].setAttribute("aria-valuenow", Math.round(weight * 100));
      });
      const top = (r) => floor - Math.min(r * total * room, floor - 4);
      curve.setAttribute("points", found.reference.map((r, j) => `${(j + 0.5) * step},${top(r)}`).join(" "));
      for (const [key, element] of Object.entries(shown)) {
        element.textContent = key === "mean" || key === "sd" ? found[key].toFixed(2) : found[key].toPrecision(3);
        element.title = found[key];
      }
      place.measured = found;
    }

    function set(j, weight) {
      weights = weights.map((other, i) => Math.min(1, Math.max(LEAST, i === j ? weight : other)));
      show();
    }

    function start(shape) {
      weights = Array.from({ length: SLICES }, (_, j) => Math.min(1, shape(j)));
      show();
    }

    // Guidance alone: steps down the gradient of forward KL with respect to the logits, which is a - r.
    let timer;
    function pull() {
      clearInterval(timer);
      let left = 60;
      timer = setInterval(() => {
        const { attention, reference } = measure(weights);
        const next = weights.map((weight, j) => weight * Math.exp(3 * (reference[j] - attention[j])));
        const highest = Math.max(...next), kept = Math.max(...weights);
        weights = next.map((weight) => weight * kept / highest);
        show();
        if (--left === 0) clearInterval(timer);
      }, 30);
    }

    let held = null;
    const at = (event) => {
      const box = drawing.getBoundingClientRect();
      const j = Math.floor((event.clientX - box.left) / box.width * SLICES);
      const weight = (floor - (event.clientY - box.top) / box.height * height) / room;
      return [Math.min(SLICES - 1, Math.max(0, j)), weight];
    };
    const drag = (event) => {
      const [j, weight] = at(event);
      const [from, before] = held ?? [j, weight];
      const steps = Math.abs(j - from); // a quick hand skips slices: those between get what lies between
      for (let i = 1; i < steps; i++) set(from + Math.sign(j - from) * i, before + (weight - before) * i / steps);
      held = [j, weight];
      set(j, weight);
    };
    drawing.addEventListener("pointerdown", (event) => {
      clearInterval(timer);
      drawing.setPointerCapture(event.pointerId);
      drag(event);
    });
    drawing.addEventListener("pointermove", (event) => held && drag(event));
    for (const end of ["pointerup", "pointercancel"]) drawing.addEventListener(end, () => (held = null));
    drawing.addEventListener("keydown", (event) => {
      const j = bars.indexOf(event.target);
      const moves = { ArrowLeft: -1, ArrowRight: 1 }, changes = { ArrowUp: 0.05, ArrowDown: -0.05 };
      if (event.key in moves) {
        const next = bars[Math.min(SLICES - 1, Math.max(0, j + moves[event.key]))];
        bars[j].setAttribute("tabindex", -1);
        next.setAttribute("tabindex", 0);
        next.focus();
      } else if (event.key in changes) {
        clearInterval(timer);
        set(j, weights[j] + changes[event.key]);
      } else return;
      event.preventDefault();
      event.stopPropagation();
    });

    const buttons = document.createElement("div");
    buttons.className = "buttons";
    const button = (name, act) => {
      const made = Object.assign(document.createElement("button"), { type: "button", textContent: name });
      made.className = "md-button";
      made.addEventListener("click", act);
      buttons.append(made);
    };
    for (const [name, shape] of Object.entries(STARTS)) {
      button(name, () => {
        clearInterval(timer);
        start(shape);
      });
    }
    button("Let guidance pull", pull);
    place.replaceChildren(buttons, drawing, answers);
    start(STARTS["Two peaks"]);
  }

  for (const place of document.querySelectorAll(".guidance-figure")) build(place);
})();
