// What a screen reader needs and ipywidgets leaves out: names of the sliders' handles, and a
// region that tells what changed, once the slider rests. Without this script all else works.
(() => {
  const attend = (root) => {
    root.dataset.attended = "";
    const live = document.createElement("div");
    live.setAttribute("role", "status");
    live.style.cssText = "position: absolute; width: 1px; height: 1px; clip-path: inset(50%)";
    root.append(live);
    let resting;
    const look = () => {
      for (const slider of root.querySelectorAll(".widget-slider")) {
        const handle = slider.querySelector(".noUi-handle");
        const say = (attribute, from) =>
          handle?.setAttribute(attribute, slider.querySelector(from).textContent);
        say("aria-label", ".widget-label");
        say("aria-valuetext", ".widget-readout");
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
    document.querySelectorAll(".labkit-explorer:not([data-attended])").forEach(attend);
  };
  new MutationObserver(find).observe(document.body, { childList: true, subtree: true });
  find();
})();
