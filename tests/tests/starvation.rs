//! Nobody starves: beside long prompts that come one after the other, running requests keep moving and every waiting one is
//! begun, within a number of steps that follows from who is there. Owner: planning of steps and batching.

use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokenrouter_core::ids::RequestId;
use tokenrouter_tests::world::{Script, algorithm, assert_idle, assert_text, parse, watch};

/// What a request consumed in a step: its first position and how many.
type Part = (u32, usize);

/// A step: when it began, and the requests in it.
struct Seen {
    at: Duration,
    parts: BTreeMap<RequestId, Part>,
}

/// All steps of a world with one model.
fn steps(script: &Script) -> Vec<Seen> {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&steps);
    let play = watch(script, algorithm(script), move |_, at, step| {
        let parts = step.rows.iter().map(|row| (row.request, (row.start, row.tokens.len()))).collect();
        notes.lock().expect("no panic holds it").push(Seen { at, parts });
    });
    assert_idle(&play);
    assert_text(script, &*algorithm(script), &play);
    std::mem::take(&mut *steps.lock().expect("no panic holds it"))
}

/// A world of `users` (arrival in ms, tokens of the prompt, tokens to make), room for all of them in memory.
fn world((rows, chunk): (u32, u32), users: &[(u32, u32, u32)]) -> Script {
    let mut text =
        format!("model m step=5ms token=0.1ms rows={rows} chunk={chunk} pages=1000 context=2048\nroute stay\n");
    for (index, (at, prompt, max)) in users.iter().enumerate() {
        writeln!(text, "at {at}ms submit r{index} prompt={prompt} max={max} seed={}", index + 1).expect("a string");
    }
    parse(&text).expect("a scenario")
}

/// Longest wait of each request, in steps of others: before its first part, and between two of its parts.
fn waits(steps: &[Seen], users: &[(u32, u32, u32)]) -> Vec<(usize, usize)> {
    // Numbers are given in the order of arrival.
    let mut order: Vec<usize> = (0..users.len()).collect();
    order.sort_by_key(|&index| users[index].0);
    let wait = |(place, &index): (usize, &usize)| {
        let id = RequestId(place as u64 + 1);
        let arrived = Duration::from_millis(u64::from(users[index].0));
        // The last step may begin in the moment of an arrival.
        let could = steps.iter().position(|step| step.at > arrived).unwrap_or(steps.len());
        let took: Vec<usize> = (0..steps.len()).filter(|&step| steps[step].parts.contains_key(&id)).collect();
        let first = took.first().expect("everybody takes part").saturating_sub(could);
        let between = took.windows(2).map(|pair| pair[1] - pair[0] - 1).max().unwrap_or(0);
        (first, between)
    };
    order.iter().enumerate().map(wait).collect()
}

proptest! {
    /// A batch is who is first in the queue, and goes to its end; in a batch who has waited longest chooses first. So nobody is
    /// passed over more often than there are others, nor waits for more than a round of batches each time.
    #[test]
    fn nobody_waits_for_more_rounds_than_there_are_others(
        rows in 1u32..6,
        chunk in 32u32..120,
        users in prop::collection::vec((0u32..300, 1u32..400, 1u32..40), 2..12),
    ) {
        let steps = steps(&world((rows, chunk), &users));
        let most = users.len() * users.len().div_ceil(rows as usize);
        for (first, between) in waits(&steps, &users) {
            prop_assert!(first < most && between < most, "{first} and {between} of {most} steps");
        }
    }

    /// With a row for everybody, and room for a chunk beside them and the ends of all prompts, running requests are in every
    /// step.
    #[test]
    fn running_requests_are_in_every_step_beside_long_prompts(
        chunk in 500u32..900,
        running in prop::collection::vec(20u32..60, 1..6),
        prompts in prop::collection::vec((20u32..200, 600u32..2000), 1..8),
    ) {
        let users: Vec<(u32, u32, u32)> = running
            .iter()
            .map(|max| (0, 4, *max))
            .chain(prompts.iter().map(|(at, prompt)| (*at, *prompt, 1)))
            .collect();
        let steps = steps(&world((16, chunk), &users));
        for (first, between) in &waits(&steps, &users)[..running.len()] {
            prop_assert_eq!((*first, *between), (0, 0));
        }
    }
}

/// Row 25 of the public faults: requests of 2,000 tokens one after the other, and somebody who is in the middle of an answer.
#[test]
fn a_stream_keeps_moving_beside_back_to_back_prompts_of_2000_tokens() {
    let mut users = vec![(0, 4, 150)];
    users.extend((0..6).map(|number| (20 + number, 2000, 2)));
    let steps = steps(&world((8, 64), &users));
    let waits = waits(&steps, &users);
    assert_eq!(waits[0], (0, 0), "it is in every step");
    let slowest = steps.windows(2).map(|pair| pair[1].at - pair[0].at).max().expect("many steps");
    // 5 ms and 64 tokens of 0.1 ms, in whole milliseconds: the step is never longer for the prompts.
    assert!(slowest <= Duration::from_millis(12), "{slowest:?}");
    for (first, between) in &waits[1..] {
        assert!(*first < 7 && *between < 7, "{first} and {between} steps: each prompt is begun and goes on in turn");
    }
    assert!(steps.iter().all(|step| step.parts.values().map(|(_, tokens)| tokens).sum::<usize>() <= 64));
}
