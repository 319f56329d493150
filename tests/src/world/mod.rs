//! The World: whole subservers with simulated devices on a virtual clock. A scenario is text, and so is what it did,
//! so a test is two texts side by side. Owner: the test that plays it. Invariant: the same scenario gives the same
//! timeline, always; time passes only when every actor waits.

mod check;
mod codec;
mod play;
pub mod reference;
mod script;

pub use check::{assert_idle, assert_text};
pub use codec::Words;
pub use play::{Play, algorithm, play, play_with, watch};
pub use script::{Act, Model, Request, Script, ScriptError, parse};
