// The lab's arithmetic, operation for operation as in samerun/core/lab.py. The page checks itself against runs that
// were computed there, bit for bit, before it lets anybody step.
"use strict";
const RULES = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const start = (x) => ({ x, m: 0, v: 0, step: 0, index: 0, cursor: 0 });

  function power(base, exponent) {
    let product = 1;
    for (let count = 0; count < exponent; count++) product *= base;
    return product;
  }

  function gradient(rule, state) {
    return rule === "samples" ? state.x - data.samples[state.cursor % data.samples.length] : state.x;
  }

  function rate(rule, eta, state) {
    return rule === "schedule" ? eta * (Math.max(data.horizon - state.index, 0) / data.horizon) : eta;
  }

  function advance(rule, eta, state) {
    const g = gradient(rule, state), now = rate(rule, eta, state);
    if (rule === "gradient") return { ...state, x: state.x - now * g };
    if (rule === "momentum") {
      const m = data.momentum * state.m + g;
      return { ...state, x: state.x - now * m, m };
    }
    if (rule === "adam") {
      const step = state.step + 1;
      const m = data.beta1 * state.m + (1 - data.beta1) * g;
      const v = data.beta2 * state.v + (1 - data.beta2) * (g * g);
      const mean = m / (1 - power(data.beta1, step)), spread = Math.sqrt(v / (1 - power(data.beta2, step)));
      return { ...state, x: state.x - (now * mean) / (spread + data.epsilon), m, v, step };
    }
    if (rule === "schedule") return { ...state, x: state.x - now * g, index: state.index + 1 };
    return { ...state, x: state.x - now * g, cursor: state.cursor + 1 };
  }

  // What a resume holds that did not restore `lost`.
  const forget = (state, lost) => ({ ...state, ...Object.fromEntries(lost.map((part) => [part, start(0)[part]])) });
  const isRight = (predicted, actual) => Math.abs(predicted - actual) <= 0.001 * Math.abs(actual);
  const sameState = (a, b) => Object.keys(a).every((part) => Object.is(a[part], b[part]));

  // The number of states that agree with Python's, or null if one does not.
  function selfCheck() {
    let count = 0;
    for (const { rule, eta, lost, states } of data.vectors) {
      const whole = data.vectors.find((other) => other.rule === rule && other.eta === eta && other.lost === null);
      let state = lost === null ? start(states[0].x) : forget(whole.states[data.checkpoint], lost);
      for (const [place, expected] of states.entries()) {
        if (place) state = advance(rule, eta, state);
        if (!sameState(state, expected)) return null;
        count++;
      }
    }
    return count;
  }

  return { start, gradient, rate, advance, forget, isRight, selfCheck, hidden: data.hidden, checkpoint: data.checkpoint, samples: data.samples };
})();
