//! The nearest valid name to a misspelt one. Pure.

/// The candidate with the smallest edit distance to `name`, if it is near enough to be what was meant: at most a third
/// of the longer name's characters differ (one at least). Ties go to the earlier candidate.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (distance(&name, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (name.chars().count().max(candidate.chars().count()) / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `did you mean …?` when something is near, otherwise the list of what is valid.
pub(crate) fn hint(name: &str, candidates: &[&str]) -> String {
    match nearest(name, candidates.iter().copied()) {
        Some(candidate) => format!("did you mean `{candidate}`?"),
        None => format!("valid: {}", candidates.join(", ")),
    }
}

/// Edit distance with insertion, deletion, substitution and transposition of neighbours (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("abc", "acb", 1),
            ("max_tokns", "max_tokens", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn nearest_is_near_or_nothing() {
        let keys = ["name", "path", "threads", "kv_memory"];
        assert_eq!(nearest("thread", keys), Some("threads"));
        assert_eq!(nearest("Path", keys), Some("path"));
        assert_eq!(nearest("kv-memory", keys), Some("kv_memory"));
        assert_eq!(nearest("temperature", keys), None);
        assert_eq!(hint("temperature", &keys), "valid: name, path, threads, kv_memory");
    }
}
