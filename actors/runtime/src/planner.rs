//! Thresholds that follow what the models do. Owner: the thresholds in force. Invariant: batchers read thresholds and
//! never wait for a plan.

use crate::messages::Thresholds;
use actix::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::theory::table::Table;
use tracing::warn;

/// The thresholds that were planned last, and the Batchers of this process that follow them.
#[derive(Debug, Default)]
pub struct InForce(Mutex<Following>);

#[derive(Debug, Default)]
struct Following {
    table: Option<Arc<Table>>,
    batchers: BTreeMap<ModelIdx, Recipient<Thresholds>>,
}

impl InForce {
    /// A Batcher in a new life: it gets every table from now on, and here the one in force; none when the launch
    /// settings still hold.
    pub fn follow(&self, model: ModelIdx, batcher: Recipient<Thresholds>) -> Option<Arc<Table>> {
        let mut following = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        following.batchers.insert(model, batcher);
        following.table.clone()
    }

    /// All Batchers of this process go by this table from now on.
    pub fn adopt(&self, table: Arc<Table>) {
        let mut following = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        following.table = Some(Arc::clone(&table));
        for (model, batcher) in &following.batchers {
            // A Batcher that is gone has a successor that asks when it starts.
            if let Err(error) = batcher.try_send(Thresholds(Arc::clone(&table))) {
                warn!(%model, %error, "a batcher did not get its new thresholds");
            }
        }
    }
}
