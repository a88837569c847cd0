// Every element with text of its own against the background that is painted behind it (WCAG 2.1, relative luminance).
() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const linear = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (let node = element; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const low = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(".visually-hidden, .skip, script")) continue;
    const colors = [parse(getComputedStyle(element).color), behind(element)].map(luminance).sort((a, b) => b - a);
    const ratio = (colors[0] + 0.05) / (colors[1] + 0.05);
    if (ratio < 4.5) low.add(`${element.tagName}.${element.className} "${element.textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return [...low].slice(0, 20);
}
