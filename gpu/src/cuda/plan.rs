//! Memory of a CUDA device for the models on it. Owner: the launcher, before a weight is read. Invariant: what is planned
//! fits the budget; models without a size of their own get room for the same number of tokens, as large as it can be,
//! because a routed request keeps its keys and values at every model it has visited.

use std::fmt;
use tokenrouter_core::executor::PAGE_TOKENS;

/// What a model takes, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Weights as the device keeps them.
    pub weights: u64,
    /// Activations, scratch and staging.
    pub workspace: u64,
    /// What recorded steps take.
    pub graphs: u64,
    /// A page of keys and values in all layers.
    pub page: u64,
}

impl Cost {
    /// All but keys and values.
    pub fn fixed(&self) -> u64 {
        self.weights.saturating_add(self.workspace).saturating_add(self.graphs)
    }
}

/// How many pages a model wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// So many.
    Fixed(u32),
    /// As many as fit, and no more than could ever be used.
    Shared {
        /// More would never be used.
        most: u32,
    },
}

/// A model to be planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// What it takes.
    pub cost: Cost,
    /// What it wants.
    pub pages: Pages,
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Number of the device.
    pub ordinal: usize,
    /// Free bytes, before any model is loaded.
    pub free: u64,
    /// Bytes that models may take.
    pub bytes: u64,
}

/// Models that do not fit, with the sum.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refused {
    budget: Budget,
    members: Vec<(Member, u32)>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { ordinal, free, bytes } = self.budget;
        write!(f, "cuda:{ordinal} has {} free, models may take {}", size(free), size(bytes))?;
        let mut sum = 0u64;
        for (Member { name, cost, .. }, pages) in &self.members {
            let (kv, tokens) = (cost.page.saturating_mul(u64::from(*pages)), u64::from(*pages) * PAGE_TOKENS as u64);
            let all = cost.fixed().saturating_add(kv);
            sum = sum.saturating_add(all);
            let Cost { weights, workspace, graphs, .. } = *cost;
            write!(f, "; {name}: weights {} + workspace {}", size(weights), size(workspace))?;
            write!(f, " + graphs {} + keys and values of {tokens} tokens {} = {}", size(graphs), size(kv), size(all))?;
        }
        write!(f, "; together {}, {} too much; ", size(sum), size(sum.saturating_sub(bytes)))?;
        f.write_str("lower kv_tokens, kv_memory, step_tokens_max or rows_max, or use smaller weights or another device")
    }
}

fn size(bytes: u64) -> String {
    const MIB: f64 = (1u64 << 20) as f64;
    match bytes as f64 / MIB {
        mib if mib >= 1024.0 => format!("{:.2} GiB", mib / 1024.0),
        mib => format!("{mib:.1} MiB"),
    }
}

/// Pages of each model: as asked for, or the largest number that all others can have.
///
/// # Errors
/// [`Refused`] with the arithmetic when the models do not fit with at least a page each.
pub fn share(budget: Budget, members: &[Member]) -> Result<Vec<u32>, Refused> {
    let least = |member: &Member| match member.pages {
        Pages::Fixed(pages) => pages,
        Pages::Shared { .. } => 1,
    };
    let with = |common: u32| -> Vec<u32> {
        let pages = members.iter().map(|member| match member.pages {
            Pages::Fixed(pages) => pages,
            Pages::Shared { most } => common.min(most.max(1)),
        });
        pages.collect()
    };
    let fits = |pages: &[u32]| {
        let bytes = members
            .iter()
            .zip(pages)
            .map(|(Member { cost, .. }, &pages)| u128::from(cost.fixed()) + u128::from(cost.page) * u128::from(pages));
        bytes.sum::<u128>() <= u128::from(budget.bytes)
    };
    if !fits(&with(1)) {
        let members = members.iter().map(|member| (member.clone(), least(member))).collect();
        return Err(Refused { budget, members });
    }
    // The most that fit: more pages never take less memory.
    let (mut low, mut high) = (1u32, u32::MAX);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(&with(middle)) { low = middle } else { high = middle - 1 }
    }
    Ok(with(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, fixed: u64, page: u64, pages: Pages) -> Member {
        let cost = Cost { weights: fixed / 2, workspace: fixed / 4, graphs: fixed - fixed / 2 - fixed / 4, page };
        Member { name: name.into(), cost, pages }
    }

    fn budget(bytes: u64) -> Budget {
        Budget { ordinal: 0, free: 2 * bytes, bytes }
    }

    #[test]
    fn models_get_room_for_the_same_number_of_tokens() {
        let any = Pages::Shared { most: u32::MAX };
        let models = [member("small", 100, 1, any), member("large", 300, 9, any)];
        assert_eq!(share(budget(1400), &models), Ok(vec![100, 100]));
        assert_eq!(share(budget(1409), &models), Ok(vec![100, 100]), "a page for one of them alone is no use");
        let capped = [member("small", 100, 1, Pages::Shared { most: 20 }), models[1].clone()];
        assert_eq!(share(budget(1400), &capped), Ok(vec![20, 108]), "what one cannot use goes to the others");
        let fixed = [member("small", 100, 1, Pages::Fixed(550)), models[1].clone()];
        assert_eq!(share(budget(1400), &fixed), Ok(vec![550, 50]));
        assert_eq!(share(budget(0), &[]), Ok(vec![]));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_sum() {
        let mib = 1 << 20;
        let models = [
            member("small", 100 * mib, mib, Pages::Shared { most: 50 }),
            member("large", 3000 * mib, 9 * mib, Pages::Fixed(20)),
        ];
        let error = share(budget(3000 * mib), &models).expect_err("too much").to_string();
        for part in [
            "cuda:0 has 5.86 GiB free, models may take 2.93 GiB",
            "small: weights 50.0 MiB + workspace 25.0 MiB + graphs 25.0 MiB + keys and values of 16 tokens 1.0 MiB = 101.0 MiB",
            "keys and values of 320 tokens 180.0 MiB = 3.11 GiB",
            "together 3.20 GiB, 281.0 MiB too much",
            "lower kv_tokens",
        ] {
            assert!(error.contains(part), "{error}\nshould say {part:?}");
        }
        assert!(share(budget(3281 * mib), &models).is_ok());
    }
}
