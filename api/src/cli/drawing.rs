//! Pictures as SVG: what the charts of several commands share. Pure. Invariant: the text is well-formed XML that needs
//! nothing from outside, and its colours follow the reader's light or dark scheme.

use std::fmt::Write;

/// Colours that can be told apart on white and on black, and by most people with a colour deficiency.
pub const COLORS: [&str; 10] =
    ["#0e86d4", "#d9622b", "#2b9a66", "#b15ac7", "#b8860b", "#d6466f", "#5f8ea0", "#8c6d46", "#5a63d8", "#7d8590"];
const STYLE: &str = "<style>:root{--paper:#fff;--ink:#1f2328;--grid:#d5d9de}\
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--grid:#30363d}}\
.paper{fill:var(--paper)}text{fill:var(--ink);font:13px system-ui,sans-serif}\
.grid{stroke:var(--grid);stroke-width:1}.error{stroke:var(--ink);stroke-width:1.5}.curve{fill:none;stroke-width:2}</style>";

/// The head of a picture of this size, with its title and paper.
pub fn opened((width, height): (f64, f64), title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">\n\
         <title>{}</title>\n{STYLE}\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n",
        escaped(title)
    )
}

/// The picture with its end.
pub fn closed(mut out: String) -> String {
    out.push_str("</svg>\n");
    out
}

/// A line of the grid.
pub fn line(out: &mut String, from: (f64, f64), to: (f64, f64)) {
    styled(out, "grid", (from, to));
}

/// A line of an error bar.
pub fn error(out: &mut String, from: (f64, f64), to: (f64, f64)) {
    styled(out, "error", (from, to));
}

fn styled(out: &mut String, class: &str, ((x1, y1), (x2, y2)): ((f64, f64), (f64, f64))) {
    let _ = writeln!(out, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

/// A text; the anchor is `start`, `middle` or `end`.
pub fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(text));
}

/// A text from bottom to top around this place.
pub fn turned(out: &mut String, (x, y): (f64, f64), text: &str) {
    let place = format!("translate({x} {y:.1}) rotate(-90)");
    let _ = writeln!(out, "<text transform=\"{place}\" text-anchor=\"middle\">{}</text>", escaped(text));
}

/// Text that means itself in XML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Checks tags, attributes and entities of XML without comments or declarations; returns the names of all elements.
    pub fn elements(xml: &str) -> Vec<String> {
        let (mut open, mut all) = (Vec::new(), Vec::new());
        for part in xml.trim().split('<').skip(1) {
            let (tag, text) = part.split_once('>').unwrap_or_else(|| panic!("`<{part}` is not closed"));
            for (at, _) in part.match_indices('&') {
                assert!(
                    ["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|entity| part[at..].starts_with(entity)),
                    "{part}"
                );
            }
            assert!(!text.contains('>') && tag.matches('"').count().is_multiple_of(2), "{part}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "{part}");
                continue;
            }
            let name = tag.trim_end_matches('/').split_whitespace().next().expect("a name").to_owned();
            if !tag.ends_with('/') {
                open.push(name.clone());
            }
            all.push(name);
        }
        assert_eq!(open, Vec::<String>::new(), "elements that stay open");
        all
    }

    #[test]
    fn texts_cannot_break_out() {
        let mut out = opened((10.0, 20.0), "a < b & \"c\"");
        text(&mut out, (1.0, 2.0), "end", "</text><x>");
        turned(&mut out, (1.0, 2.0), "up & down");
        error(&mut out, (0.0, 0.0), (1.0, 1.0));
        assert_eq!(elements(&closed(out)), ["svg", "title", "style", "rect", "text", "text", "line"]);
    }
}
