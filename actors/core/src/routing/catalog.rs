//! The algorithms a program knows: the list of this crate and what the program adds. Owner: the program, which passes it
//! to the launcher. Invariant: there is no other way to add an algorithm, and nothing is registered behind its back.

use super::{Algorithm, Entry, RoutingError};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// The list of this crate, and entries of the program behind it.
#[derive(Clone, Copy, Default)]
pub struct Catalog {
    extra: &'static [&'static Entry],
}

impl fmt::Debug for Catalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.entries().map(|entry| entry.name)).finish()
    }
}

impl Catalog {
    /// The list of this crate and `extra`. An added entry hides one of the same name.
    pub const fn with(extra: &'static [&'static Entry]) -> Catalog {
        Catalog { extra }
    }

    /// Every entry, those of this crate first.
    pub fn entries(self) -> impl Iterator<Item = &'static Entry> {
        let hidden = move |entry: &&Entry| self.extra.iter().any(|extra| extra.name == entry.name);
        super::list().filter(move |entry| !hidden(entry)).chain(self.extra.iter().copied())
    }

    /// Builds the algorithm of this name.
    ///
    /// # Errors
    /// [`RoutingError`] naming the parameter and what is allowed.
    pub fn build(self, name: &str, params: &Value, models: usize) -> Result<Arc<dyn Algorithm>, RoutingError> {
        let found = self.entries().find(|entry| entry.name == name);
        let entry = found.ok_or_else(|| RoutingError::Unknown {
            name: name.to_owned(),
            known: self.entries().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
        })?;
        let (least, most) = entry.models;
        if models < least || models > most {
            return Err(RoutingError::Models { name: entry.name, least, most, models });
        }
        (entry.build)(params, models)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::stay;
    use serde_json::json;

    const MINE: Entry = Entry { name: "mine", models: (2, 2), ..stay::ENTRY };
    const HIDES: Entry = Entry { name: "stay", summary: "another", ..stay::ENTRY };

    #[test]
    fn added_entries_are_known_and_hide_their_namesakes() {
        let catalog = Catalog::with(&[&MINE, &HIDES]);
        assert!(catalog.build("mine", &json!({}), 2).is_ok());
        assert!(matches!(catalog.build("mine", &json!({}), 3), Err(RoutingError::Models { name: "mine", .. })));
        let stays: Vec<&str> =
            catalog.entries().filter(|entry| entry.name == "stay").map(|entry| entry.summary).collect();
        assert_eq!(stays, ["another"]);
        assert_eq!(catalog.entries().count(), Catalog::default().entries().count() + 1);
        let unknown = Catalog::default().build("mine", &json!({}), 2).map(drop).unwrap_err().to_string();
        assert!(
            unknown.contains("unknown routing algorithm `mine`; known are ") && unknown.contains("stay"),
            "{unknown}"
        );
    }
}
