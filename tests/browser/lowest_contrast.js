// The lowest contrast between a text of the page and what is behind it, by WCAG 2.1.
const channels = colour => colour.match(/[\d.]+/g).map(Number);
const linear = v => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
function behind(element) {
  for (; element; element = element.parentElement) {
    const colour = channels(getComputedStyle(element).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
}
let lowest = 21;
for (const element of document.querySelectorAll("body *")) {
  const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!hasText || !element.offsetParent) continue;
  const both = [luminance(channels(getComputedStyle(element).color)), luminance(behind(element))];
  lowest = Math.min(lowest, (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05));
}
return lowest;
