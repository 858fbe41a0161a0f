// What a screen reader needs and ipywidgets leaves out: names of the sliders' handles, and a
// region that tells what changed, once the slider rests. Without this script all else works.
(() => {
  const attend = (root) => {
    root.dataset.attended = "";
    const live = document.createElement("div");
    live.setAttribute("role", "status");
    live.style.cssText = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)";
    root.append(live);
    let resting;
    const look = () => {
      for (const slider of root.querySelectorAll(".widget-slider")) {
        const handle = slider.querySelector(".noUi-handle");
        handle?.setAttribute("aria-label", slider.querySelector(".widget-label").textContent);
        handle?.setAttribute("aria-valuetext", slider.querySelector(".widget-readout").textContent);
      }
      clearTimeout(resting);
      resting = setTimeout(() => {
        const words = root.querySelector(".labkit-words")?.innerText ?? "";
        if (live.textContent !== words) live.textContent = words;
      }, 600);
    };
    new MutationObserver(look).observe(root, { childList: true, subtree: true });
    look();
  };
  const find = () => {
    for (const root of document.querySelectorAll(".labkit-explorer:not([data-attended])")) attend(root);
  };
  new MutationObserver(find).observe(document.body, { childList: true, subtree: true });
  find();
})();
