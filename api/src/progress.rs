//! Progress bars on stderr for what takes long: downloads, loading, evaluation.
//! Owner: the command that was given. Invariant: nothing is drawn unless stderr is a terminal and the user wants it.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

const BYTES: &str = "{msg:<28} {wide_bar} {bytes:>10}/{total_bytes:<10} {bytes_per_sec:>12} {eta:>4}";
const BUSY: &str = "{msg:<28} {pos:>6} {elapsed:>6}";
const COUNT: &str = "{msg:<28} {wide_bar} {pos:>6}/{len:<6} {eta:>4}";

/// Where bars are drawn, if anywhere.
#[derive(Clone, Debug)]
pub struct Progress {
    bars: MultiProgress,
}

impl Progress {
    /// Bars on stderr if that is a terminal, otherwise none.
    pub fn on_terminal() -> Progress {
        if std::io::stderr().is_terminal() { Progress { bars: MultiProgress::new() } } else { Progress::hidden() }
    }

    /// No bars.
    pub fn hidden() -> Progress {
        Progress { bars: MultiProgress::with_draw_target(ProgressDrawTarget::hidden()) }
    }

    /// Takes all bars away.
    pub fn clear(&self) {
        // A terminal that is gone shows no bars.
        let _ = self.bars.clear();
    }

    /// A bar of `total` bytes with speed and time left.
    pub fn bytes(&self, label: &str, total: u64) -> ProgressBar {
        self.bar((label, total), BYTES)
    }

    /// A bar of `total` things with time left.
    pub fn count(&self, label: &str, total: u64) -> ProgressBar {
        self.bar((label, total), COUNT)
    }

    /// Something that takes long, nobody knows how long: how far it is.
    pub fn busy(&self, label: &str) -> ProgressBar {
        self.bar((label, 0), BUSY)
    }

    fn bar(&self, (label, total): (&str, u64), template: &str) -> ProgressBar {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = self.bars.add(ProgressBar::new(total)).with_style(style);
        bar.set_message(label.to_owned());
        bar
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_valid_and_hidden_bars_count() {
        let progress = Progress::hidden();
        for bar in [progress.bytes("load", 10), progress.count("eval", 10)] {
            bar.inc(4);
            assert_eq!((bar.position(), bar.length(), bar.is_hidden()), (4, Some(10), true));
        }
        for template in [BYTES, COUNT, BUSY] {
            assert!(ProgressStyle::with_template(template).is_ok());
        }
    }
}
