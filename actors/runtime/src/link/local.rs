//! A peer in the same process: its subserver's address, which stays the same when its children are rebuilt.

use super::{Link, LinkDown};
use crate::mailbox::Mailbox;
use crate::messages::Frame;
use crate::subserver::Subserver;
use std::sync::{Arc, OnceLock};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::Envelope;

/// The addresses of the subservers here, by model index, filled once when all have started. `None` = the model is in
/// another process.
pub type Directory = Arc<OnceLock<Vec<Option<Mailbox<Subserver>>>>>;

/// The subserver of a model, when it is here and has started.
pub fn find(directory: &Directory, model: ModelIdx) -> Option<&Mailbox<Subserver>> {
    directory.get()?.get(model.index())?.as_ref()
}

/// A link within the process.
#[derive(Clone, Debug)]
pub struct Local {
    /// Where the addresses are.
    pub directory: Directory,
    /// Whom this link reaches.
    pub to: ModelIdx,
}

impl Link for Local {
    fn send(&self, envelope: Envelope) -> Result<(), LinkDown> {
        let address = find(&self.directory, self.to);
        let address = address.ok_or_else(|| LinkDown(format!("no subserver {}", self.to)))?;
        address.try_send(Frame(envelope)).map_err(|error| LinkDown(error.to_string()))
    }
}
