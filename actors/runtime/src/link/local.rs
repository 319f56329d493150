//! A peer in the same process: its subserver's address, which stays the same when its children are rebuilt.

use super::{Link, LinkDown};
use crate::messages::Frame;
use crate::subserver::Subserver;
use actix::Addr;
use std::sync::{Arc, OnceLock};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::Envelope;

/// The addresses of all subservers, filled once when all have started.
pub type Directory = Arc<OnceLock<Vec<Addr<Subserver>>>>;

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
        let address = self.directory.get().and_then(|all| all.get(self.to.index()));
        let address = address.ok_or_else(|| LinkDown(format!("no subserver {}", self.to)))?;
        address.try_send(Frame(envelope)).map_err(|error| LinkDown(error.to_string()))
    }
}
