//! The picture of an ablation: a bar for each row, a group of bars for each number of workers, the height its speed over
//! that of the first row. Pure.

use super::report::{Cell, Report};
use crate::cli::drawing::{COLORS, closed, error, escaped, line, opened, text, turned};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
/// Left, top, right and bottom edge of the plot.
const PLOT: (f64, f64, f64, f64) = (64.0, 24.0, 700.0, 360.0);
/// Part of a group's width that its bars take.
const FILLED: f64 = 0.84;
/// Small models alone are many times as fast as anything routed; what lies above is cut and said in words.
const TALLEST: f64 = 2.0;

/// Heights of the plot.
#[derive(Clone, Copy)]
struct Scale {
    top: f64,
}

impl Scale {
    fn of(report: &Report) -> Scale {
        let most = report.cells.iter().map(|cell| report.ratio(cell).mean).fold(1.0, f64::max);
        Scale { top: (most * 1.1).min(TALLEST) }
    }

    fn y(self, ratio: f64) -> f64 {
        PLOT.3 - (PLOT.3 - PLOT.1) * (ratio / self.top).clamp(0.0, 1.0)
    }
}

/// Draws the ratios.
pub fn picture(report: &Report) -> String {
    let title = format!("Speed by what is taken away: {}, {}", report.shape, report.routing);
    let mut out = opened((WIDTH, HEIGHT), &title);
    let scale = Scale::of(report);
    axes(&mut out, scale, report);
    let (columns, rows) = (report.columns(), report.rows());
    let group = (PLOT.2 - PLOT.0) / columns.len().max(1) as f64;
    let width = group * FILLED / rows.len().max(1) as f64;
    for (column, &workers) in columns.iter().enumerate() {
        let left = PLOT.0 + group * column as f64;
        text(&mut out, (left + group / 2.0, PLOT.3 + 20.0), "middle", &format!("N = {workers}"));
        for (index, &row) in rows.iter().enumerate() {
            let at = left + group * (1.0 - FILLED) / 2.0 + width * index as f64;
            if let Some(cell) = report.cell(row, workers) {
                bar(&mut out, scale, (report, cell), (index, at, width));
            }
        }
    }
    for (index, row) in rows.iter().enumerate() {
        let at = PLOT.1 + 14.0 + 22.0 * index as f64;
        let (x, color) = (PLOT.2 + 24.0, COLORS[index % COLORS.len()]);
        let _ = writeln!(out, "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"10\" height=\"10\" fill=\"{color}\"/>", at - 9.0);
        text(&mut out, (PLOT.2 + 42.0, at), "start", row.title());
    }
    closed(out)
}

fn axes(out: &mut String, scale: Scale, report: &Report) {
    let mut ratio = 0.0;
    while ratio <= scale.top {
        let at = scale.y(ratio);
        line(out, (PLOT.0, at), (PLOT.2, at));
        text(out, (PLOT.0 - 8.0, at + 4.0), "end", &format!("{ratio:.2}"));
        ratio += 0.25;
    }
    let first = report.rows().first().map_or("", |row| row.title());
    turned(out, (18.0, (PLOT.1 + PLOT.3) / 2.0), &format!("tokens per second over those of {first}"));
    text(out, ((PLOT.0 + PLOT.2) / 2.0, PLOT.3 + 44.0), "middle", "requests live at once; lines: 95 % confidence");
}

/// One bar with its interval; it says its numbers when pointed at.
fn bar(out: &mut String, scale: Scale, (report, cell): (&Report, &Cell), (index, x, width): (usize, f64, f64)) {
    let ratio = report.ratio(cell);
    let (top, color) = (scale.y(ratio.mean), COLORS[index % COLORS.len()]);
    let height = PLOT.3 - top;
    let speed = cell.speed.iter().sum::<f64>() / cell.speed.len().max(1) as f64;
    let said = escaped(&format!("{}, N = {}: {:.3}, {speed:.1} tokens/s", cell.row.title(), cell.workers, ratio.mean));
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{color}\"><title>{said}</title></rect>",
        width - 1.0
    );
    let middle = x + (width - 1.0) / 2.0;
    if ratio.mean > scale.top {
        text(out, (middle, PLOT.1 - 6.0), "middle", &format!("{:.1}", ratio.mean));
    } else if let Some(half) = ratio.ci95.filter(|half| *half > 0.0) {
        error(out, (middle, scale.y(ratio.mean - half)), (middle, scale.y(ratio.mean + half)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::example;
    use super::*;
    use crate::cli::drawing::tests::elements;

    #[test]
    fn every_cell_has_a_bar_as_high_as_its_ratio() {
        let mut report = example();
        let svg = picture(&report);
        let rects = elements(&svg).iter().filter(|name| *name == "rect").count();
        assert_eq!(rects, 1 + report.cells.len() + report.rows().len(), "paper, bars and legend");
        let scale = Scale::of(&report);
        assert_eq!((scale.y(0.0), scale.y(1.1)), (PLOT.3, PLOT.1));
        assert!(svg.contains("full, N = 4: 1.000, 101.0 tokens/s"));
        // A row that is much faster is cut at the top, and its number stands there.
        report.cells[1].speed = vec![500.0, 505.0, 510.0];
        assert!(picture(&report).contains(">5.0</text>"));
    }
}
