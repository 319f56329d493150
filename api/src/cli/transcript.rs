//! An answer as a picture: what `generate` shows on a terminal, as SVG for pages that show no terminals. Pure. Invariant:
//! the text is the answer's own, every character in the colour of its writer, and the same answer gives the same bytes.

use super::drawing::escaped;
use super::paint::rgb;
use std::fmt::Write;
use tokenrouter_core::ids::ModelIdx;

/// Characters of a line.
const COLUMNS: usize = 84;
/// Size of a character's cell.
const CELL: (f64, f64) = (8.4, 20.0);
/// Room around the text.
const MARGIN: f64 = 20.0;
const STYLE: &str = "<style>:root{--paper:#fff;--ink:#1f2328;--line:#d5d9de}\
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--line:#30363d}}\
.paper{fill:var(--paper);stroke:var(--line)}\
text{fill:var(--ink);font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}";

/// What one model wrote in a row.
pub type Run = (ModelIdx, String);

/// An answer with what was asked before it.
pub struct Transcript<'a> {
    /// The command as it was typed.
    pub asked: &'a str,
    /// The answer.
    pub runs: &'a [Run],
    /// Below the answer: each model's part, then the rest.
    pub parts: &'a [Run],
    /// The rest.
    pub rest: &'a str,
}

impl Transcript<'_> {
    /// The picture.
    pub fn svg(&self) -> String {
        let entry = ModelIdx(0);
        let mut lines = wrapped(&[(entry, format!("$ {}", self.asked))]);
        lines.extend(wrapped(self.runs));
        lines.push(Vec::new());
        let mut last: Vec<Run> = Vec::new();
        for part in self.parts {
            last.extend([part.clone(), (entry, " · ".to_owned())]);
        }
        last.push((entry, self.rest.to_owned()));
        lines.extend(wrapped(&last));
        drawn(&lines)
    }
}

fn drawn(lines: &[Vec<Run>]) -> String {
    let (width, height) = (2.0 * MARGIN + CELL.0 * COLUMNS as f64, 2.0 * MARGIN + CELL.1 * lines.len() as f64);
    let mut used: Vec<ModelIdx> = lines.iter().flatten().map(|(model, _)| *model).collect();
    used.sort_unstable_by_key(|model| model.index());
    used.dedup();
    let mut style = STYLE.to_owned();
    for model in &used {
        if let Some((r, g, b)) = rgb(*model) {
            let _ = write!(style, ".m{}{{fill:#{r:02x}{g:02x}{b:02x};font-weight:bold}}", model.index());
        }
    }
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.1} {height:.1}\" role=\"img\">\n\
         <title>An answer, coloured by the model that wrote each token</title>\n{style}</style>\n\
         <rect class=\"paper\" x=\"0.5\" y=\"0.5\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\"/>\n",
        width - 1.0,
        height - 1.0
    );
    for (row, line) in lines.iter().enumerate() {
        let y = MARGIN + CELL.1 * (row as f64 + 0.75);
        let mut column = 0;
        for (model, text) in line {
            let length = text.chars().count();
            // Cells are of one width in whatever font the reader has.
            let _ = writeln!(
                out,
                "<text class=\"m{}\" x=\"{:.1}\" y=\"{y:.1}\" textLength=\"{:.1}\">{}</text>",
                model.index(),
                MARGIN + CELL.0 * column as f64,
                CELL.0 * length as f64,
                escaped(text)
            );
            column += length;
        }
    }
    out + "</svg>\n"
}

/// Lines of at most [`COLUMNS`] characters, broken between words where that is possible.
fn wrapped(runs: &[Run]) -> Vec<Vec<Run>> {
    let cells: Vec<(ModelIdx, char)> =
        runs.iter().flat_map(|(model, text)| text.chars().map(|character| (*model, character))).collect();
    let mut lines = Vec::new();
    for paragraph in cells.split(|(_, character)| *character == '\n') {
        let mut rest = paragraph;
        while rest.len() > COLUMNS {
            let space = rest[..=COLUMNS].iter().rposition(|(_, character)| *character == ' ').filter(|at| *at > 0);
            let (line, more) = rest.split_at(space.unwrap_or(COLUMNS));
            lines.push(joined(line));
            rest = if space.is_some() { &more[1..] } else { more };
        }
        lines.push(joined(rest));
    }
    lines
}

/// Neighbours of one model as one run.
fn joined(cells: &[(ModelIdx, char)]) -> Vec<Run> {
    let same = cells.chunk_by(|(a, _), (b, _)| a == b);
    same.map(|run| (run[0].0, run.iter().map(|(_, character)| *character).collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::super::drawing::tests::elements;
    use super::*;

    const SMALL: ModelIdx = ModelIdx(0);
    const LARGE: ModelIdx = ModelIdx(1);

    #[test]
    fn lines_break_between_words_and_lose_nothing() {
        let words = "word ".repeat(40);
        let runs = [(SMALL, words.clone()), (LARGE, "x".repeat(COLUMNS + 3)), (SMALL, "\nend".to_owned())];
        let lines = wrapped(&runs);
        let text = |line: &Vec<Run>| line.iter().map(|(_, text)| text.as_str()).collect::<String>();
        assert!(lines.iter().all(|line| text(line).chars().count() <= COLUMNS));
        let joined: String = lines.iter().map(text).collect::<Vec<_>>().join("");
        let whole: String = runs.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(joined.replace([' ', '\n'], ""), whole.replace([' ', '\n'], ""));
        let large: usize =
            lines.iter().flatten().filter(|(model, _)| *model == LARGE).map(|(_, text)| text.len()).sum();
        assert_eq!(large, COLUMNS + 3);
    }

    #[test]
    fn the_picture_is_well_formed_and_coloured_by_model() {
        let transcript = Transcript {
            asked: "tokenrouter generate \"1 < 2 & 3\"",
            runs: &[(SMALL, "one ".to_owned()), (LARGE, "two".to_owned())],
            parts: &[(SMALL, "small 1".to_owned()), (LARGE, "large 1".to_owned())],
            rest: "2 hops",
        };
        let svg = transcript.svg();
        let found = elements(&svg);
        assert_eq!(
            found.iter().filter(|name| *name == "text").count(),
            1 + 2 + 3,
            "neighbours of one writer are one text"
        );
        assert!(
            svg.contains(">two</text>") && svg.contains("1 &lt; 2 &amp; 3") && svg.contains(".m1{fill:#d700af"),
            "{svg}"
        );
        assert_eq!(svg, transcript.svg());
    }
}
