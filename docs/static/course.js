// A picture has a box of its own, in which it scrolls where it would be too small.
const look = (box) => {
  const wide = box.scrollWidth > box.clientWidth;
  if (wide) box.tabIndex = 0; else box.removeAttribute("tabindex");
};
const boxes = new ResizeObserver((seen) => seen.forEach((one) => look(one.target)));
addEventListener("load", () => document.querySelectorAll(".picture").forEach(look));
for (const img of document.querySelectorAll(".bd-article img")) {
  const box = document.createElement("span");
  box.className = "picture";
  img.replaceWith(box);
  box.append(img);
  // Letters have 11 pixels or more in a picture's own size, and 9 in the page.
  const fit = () => {
    img.style.minWidth = `${img.naturalWidth * (9 / 11)}px`;
    boxes.observe(box);
  };
  if (img.complete) fit(); else img.addEventListener("load", fit);
}
// The theme leaves the name of the site outside of every landmark.
const brand = document.querySelector(".navbar-brand")?.parentElement;
brand?.setAttribute("role", "navigation");
brand?.setAttribute("aria-label", "Home");
// On paper it is light, whatever it is on the screen.
const root = document.documentElement;
let theme;
addEventListener("beforeprint", () => {
  theme = root.dataset.theme;
  root.dataset.theme = "light";
});
addEventListener("afterprint", () => { root.dataset.theme = theme; });
