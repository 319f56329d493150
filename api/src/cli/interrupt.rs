//! Ctrl-C. Owner: the main thread, which does nothing but wait while a command runs in a thread of its own. Invariant: a
//! command that is interrupted leaves no bars on the terminal, no colour, and no half-written file; the exit code is 130.
//! A command that listens itself (a server that drains, a chat whose answer is stopped) says so and is left alone.

use super::{CliError, files};
use crate::progress::Progress;
use std::io::{self, IsTerminal, Write};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Bytes of the command's stack: what the main thread's own would have.
const STACK: usize = 8 << 20;

/// Who hears of Ctrl-C.
#[derive(Clone, Debug, Default)]
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// The command listens itself from now on.
    pub fn are_mine(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn are_the_commands(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Runs a command to its end, or until Ctrl-C.
pub fn guard(
    (interrupts, progress, color): (Interrupts, Progress, bool),
    work: impl FnOnce() -> Result<(), CliError> + Send + 'static,
) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (done, ended) = oneshot::channel();
    let thread = std::thread::Builder::new().name("command".to_owned()).stack_size(STACK).spawn(move || {
        // Nobody waits for it any more after Ctrl-C.
        let _ = done.send(work());
    })?;
    let ended = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::pin!(ended);
        loop {
            tokio::select! {
                result = &mut ended => return Ok::<_, io::Error>(result.ok()),
                _ = interrupt.recv() => if !interrupts.are_the_commands() {
                    return Ok(Some(Err(CliError::Interrupted)));
                },
            }
        }
    })?;
    match ended {
        Some(Err(CliError::Interrupted)) if !interrupts.are_the_commands() => {
            let _held = files::discard();
            progress.clear();
            tidy(color);
            Err(CliError::Interrupted)
        }
        Some(result) => result,
        // The sender is gone without a word: the command panicked, which it has told already.
        None => match thread.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => Err(CliError::Failed("the command ended without a result".to_owned())),
        },
    }
}

/// Whatever was being written, the next line starts at the left and has the terminal's own colour.
fn tidy(color: bool) {
    let mut terminal = io::stderr();
    if terminal.is_terminal() {
        // A terminal that is gone needs no tidying.
        let _ = terminal.write_all(if color { b"\x1b[0m\n" } else { b"\n" });
    }
}
