// Moves the pointer across a chart and returns the longest time, in milliseconds, until the next frame.
async () => {
  const plot = document.querySelector("#chart-loss .plot");
  const box = plot.querySelector(".canvas").getBoundingClientRect();
  let longest = 0;
  for (let step = 0; step < 60; step++) {
    const began = performance.now();
    const at = { clientX: box.left + (step / 60) * box.width, clientY: box.top + 5, bubbles: true };
    plot.dispatchEvent(new PointerEvent("pointermove", at));
    await new Promise(requestAnimationFrame);
    longest = Math.max(longest, performance.now() - began);
  }
  return longest;
}
