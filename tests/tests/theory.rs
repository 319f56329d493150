//! The throughput model against published values, an independent simulation and a slow reference.

use proptest::prelude::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use tokenrouter_core::theory::chain::{Reach, throughput};
use tokenrouter_core::theory::decision::{self, Effort};
use tokenrouter_core::theory::search::{Budget, Method, Optimality, plan};
use tokenrouter_core::theory::simulate::{Length, simulate};
use tokenrouter_core::theory::system::{Affine, System};

/// A system with its throughput for every feasible B, each also found by a simulation of its authors.
#[derive(Deserialize)]
struct Vector {
    name: String,
    #[serde(rename = "N")]
    requests: u32,
    latency_ticks: Vec<Affine>,
    #[serde(rename = "P")]
    moves: Vec<Vec<f64>>,
    #[serde(rename = "C")]
    tokens: Vec<Vec<f64>>,
    #[serde(rename = "best_B")]
    best: Vec<u32>,
    table: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    #[serde(rename = "B")]
    thresholds: Vec<u32>,
    tokens_per_tick: f64,
    states: usize,
}

fn constant(ticks: f64) -> Affine {
    Affine { base: ticks, per_request: 0.0 }
}

/// Two models: the first hands over with probability p, the second hands back; tokens as R2R commits them.
fn pair(requests: u32, latency: [Affine; 2], p: f64) -> System {
    let (moves, tokens) = (vec![vec![1.0 - p, p], vec![1.0, 0.0]], vec![vec![1.0, 0.0], vec![1.0, 0.0]]);
    System::affine(requests, &latency, moves, tokens).unwrap()
}

#[test]
fn stored_vectors_are_reproduced() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../fixtures/throughput.json")).unwrap();
    assert_eq!(vectors.len(), 5);
    for vector in vectors {
        let system = System::affine(vector.requests, &vector.latency_ticks, vector.moves, vector.tokens).unwrap();
        assert_eq!(system.feasible().len(), vector.table.len(), "{}", vector.name);
        for row in &vector.table {
            let exact = throughput(&system, &row.thresholds, Reach::default()).unwrap();
            let off = (exact.throughput / row.tokens_per_tick - 1.0).abs();
            assert!(
                off < 1e-8,
                "{} {:?}: {} for {}",
                vector.name,
                row.thresholds,
                exact.throughput,
                row.tokens_per_tick
            );
            assert_eq!(exact.states, row.states, "{} {:?}", vector.name, row.thresholds);
        }
        let plan = plan(&system, Budget::default());
        assert_eq!((plan.best, plan.method), (vector.best, Method::Chain), "{}", vector.name);
        assert_eq!(plan.table.len(), vector.table.len());
    }
}

/// The published system: R2R with Qwen3-0.6B and 32B, p = 0.35, 6.0 and 27.9 ms, ticks of 0.1 ms; tokens a second.
#[test]
fn published_values_are_reproduced() {
    for (requests, second, expected) in [
        (1, 1, 63.4317),
        (2, 1, 98.957),
        (2, 2, 110.323),
        (3, 1, 142.339),
        (3, 2, 158.117),
        (3, 3, 151.891),
        (4, 1, 187.190),
        (4, 2, 195.439),
        (4, 3, 207.954),
        (4, 4, 190.742),
    ] {
        let system = pair(requests, [constant(60.0), constant(279.0)], 0.35);
        let found = throughput(&system, &[1, second], Reach::default()).unwrap().throughput * 10_000.0;
        assert!((found - expected).abs() < 6e-4, "N {requests} B_1 {second}: {found} for {expected}");
    }
}

/// Ten systems of two models with constant latency: the best threshold is the best policy of all.
#[test]
fn with_two_constant_latencies_a_threshold_is_optimal() {
    for (requests, ratio, p) in
        [4, 8].into_iter().flat_map(|n| [(n, 3., 0.15), (n, 5., 0.3), (n, 8., 0.15), (n, 8., 0.3), (n, 12., 0.3)])
    {
        let plan = plan(&pair(requests, [constant(1.0), constant(ratio)], p), Budget::default());
        assert_eq!(plan.optimality, Optimality::AllPolicies, "N {requests} ratio {ratio} p {p}");
    }
}

#[test]
fn elsewhere_the_gap_to_the_best_policy_is_said() {
    let system = pair(8, [Affine { base: 2.0, per_request: 0.5 }, Affine { base: 10.0, per_request: 1.0 }], 0.3);
    let plan = plan(&system, Budget::default());
    let Optimality::Gap { ratio, searched: false } = plan.optimality else { panic!("{:?}", plan.optimality) };
    assert!(ratio > 1e-4 && ratio < 0.05, "{ratio}");
    let bound = plan.bound.unwrap();
    assert!((bound / plan.tokens_per_tick - 1.0 - ratio).abs() < 1e-12);
}

#[test]
fn beyond_the_chain_it_is_simulated_and_said() {
    let system = pair(8, [constant(1.0), constant(10.0)], 0.3);
    let exact = plan(&system, Budget::default());
    let small = Budget { reach: Reach { states: 10, transitions: 10 }, ..Budget::default() };
    let simulated = plan(&system, small);
    assert_eq!((simulated.method, simulated.bound), (Method::Simulation, None));
    assert_eq!(simulated.optimality, Optimality::Searched);
    assert!((simulated.tokens_per_tick / exact.tokens_per_tick - 1.0).abs() < 0.01, "{simulated:?}");
}

/// Far beyond everything exact there is still an answer, in bounded time and memory.
#[test]
fn a_huge_system_is_searched_by_simulation() {
    let moves = vec![vec![0.1; 10]; 10];
    let system = System::affine(500, &[constant(3.0); 10], moves, vec![vec![1.0; 10]; 10]).unwrap();
    let budget = Budget { length: Length { ways: 5_000, seed: 1 }, ..Budget::default() };
    assert_eq!(plan(&system, budget).method, Method::Simulation);
}

/// Where the search does not look at every B, it still finds one as good.
#[test]
fn the_search_finds_what_the_whole_table_holds() {
    let affine = |base, per_request| Affine { base, per_request };
    for (system, name) in [
        (pair(12, [constant(1.0), constant(10.0)], 0.3), "constant"),
        (pair(12, [constant(1.0), constant(3.0)], 0.05), "small p"),
        (pair(12, [affine(2.0, 0.2), affine(9.0, 0.5)], 0.4), "affine"),
    ] {
        let whole = plan(&system, Budget::default());
        let searched = plan(&system, Budget { exhaustive: 0, ..Budget::default() });
        assert!(searched.table.len() < whole.table.len() / 2, "{name}: {}", searched.table.len());
        let ratio = searched.tokens_per_tick / whole.tokens_per_tick;
        assert!((ratio - 1.0).abs() < 1e-6, "{name}: {:?} for {:?}, {ratio}", searched.best, whole.best);
    }
}

#[test]
fn periodic_and_split_chains_have_their_averages() {
    // One request that alternates: 2 tokens every 3 + 4 ticks.
    let cycle = System::new(1, vec![vec![3], vec![4]], vec![vec![0., 1.], vec![1., 0.]], vec![vec![1.; 2]; 2]).unwrap();
    let found = throughput(&cycle, &[1, 1], Reach::default()).unwrap().throughput;
    assert!((found - 2.0 / 7.0).abs() < 1e-9, "{found}");
    // From model 0 a request goes for ever to model 1 or to model 2, which are as fast as 1 and 2 ticks.
    let moves = vec![vec![0.0, 0.25, 0.75], vec![0.0, 1.0, 0.0], vec![0.0, 0.0, 1.0]];
    let split = System::new(1, vec![vec![1], vec![1], vec![2]], moves, vec![vec![1.0; 3]; 3]).unwrap();
    let found = throughput(&split, &[1, 1, 1], Reach::default()).unwrap().throughput;
    // Averaged over completions: a quarter of the runs has 1 tick a completion, the others 2.
    assert!((found - 1.0 / 1.75).abs() < 1e-9, "{found}");
}

#[test]
fn malformed_systems_are_refused_by_name() {
    let fine = (vec![vec![1; 4]; 2], vec![vec![0.5; 2]; 2], vec![vec![1.0; 2]; 2]);
    let (latency, moves, tokens) = fine;
    for (result, part) in [
        (System::new(0, latency.clone(), moves.clone(), tokens.clone()), "N is 0"),
        (System::new(4, vec![], moves.clone(), tokens.clone()), "latency_ticks is empty"),
        (System::new(4, vec![vec![1], vec![]], moves.clone(), tokens.clone()), "latency_ticks[1] allows no batch"),
        (System::new(4, vec![vec![1, 0], vec![1]], moves.clone(), tokens.clone()), "latency_ticks[0] is 0 at batch 2"),
        (System::new(4, latency.clone(), vec![vec![0.5; 2]], tokens.clone()), "P has 1 rows"),
        (System::new(4, latency.clone(), vec![vec![0.5; 3]; 2], tokens.clone()), "P[0] has 3 entries"),
        (System::new(4, latency.clone(), vec![vec![0.6; 2]; 2], tokens.clone()), "P[0] is [0.6, 0.6]"),
        (System::new(4, latency.clone(), vec![vec![f64::NAN; 2]; 2], tokens.clone()), "P[0]"),
        (System::new(4, latency.clone(), moves.clone(), vec![vec![-1.0; 2]; 2]), "C holds -1"),
        (
            System::affine(4, &[constant(0.0), constant(1.0)], moves, tokens),
            "latency_ticks[0] gives 0 ticks at batch 1",
        ),
    ] {
        let error = result.expect_err(part);
        assert!(error.contains(part), "{error}");
    }
    let system = System::new(4, latency, vec![vec![0.5; 2]; 2], vec![vec![1.0; 2]; 2]).unwrap();
    for thresholds in [vec![1], vec![0, 1], vec![5, 1], vec![3, 3]] {
        assert!(throughput(&system, &thresholds, Reach::default()).is_err(), "{thresholds:?}");
        assert!(simulate(&system, &thresholds, Length::default()).is_err(), "{thresholds:?}");
    }
}

/// A slow reference that shares nothing: every request is a person with a place, all combinations are walked, and the
/// long run is the average over very many steps of the distribution.
fn reference(system: &System, thresholds: &[u32]) -> f64 {
    type State = (Vec<u32>, Vec<(u32, u32)>);
    let models = system.models();
    let launch = |(mut waiting, mut running): State| -> State {
        for i in 0..models {
            if running[i].0 == 0 && waiting[i] >= thresholds[i] {
                let batch = waiting[i].min(system.cap(i));
                waiting[i] -= batch;
                running[i] = (batch, system.ticks(i, batch));
            }
        }
        (waiting, running)
    };
    let mut waiting = vec![0; models];
    waiting[0] = system.requests();
    let mut share: BTreeMap<State, f64> = BTreeMap::from([(launch((waiting, vec![(0, 0); models])), 1.0)]);
    let (mut tokens, mut ticks) = (0.0, 0.0);
    for round in 0..6_000 {
        let mut next: BTreeMap<State, f64> = BTreeMap::new();
        for ((waiting, running), p) in share {
            let time = running.iter().filter(|run| run.0 > 0).map(|run| run.1).min().unwrap();
            let mut ways: Vec<(Vec<u32>, f64)> = vec![(waiting, p)];
            let mut after = running.clone();
            for i in 0..models {
                if running[i].0 == 0 {
                    continue;
                }
                after[i].1 -= time;
                if after[i].1 > 0 {
                    continue;
                }
                if round >= 3_000 {
                    tokens += p * f64::from(running[i].0) * system.reward(i);
                }
                after[i] = (0, 0);
                for _ in 0..running[i].0 {
                    let one = |(waiting, p): (Vec<u32>, f64)| {
                        system.moves(i).iter().enumerate().filter(|way| *way.1 > 0.0).map(move |(j, q)| {
                            let mut waiting = waiting.clone();
                            waiting[j] += 1;
                            (waiting, p * q)
                        })
                    };
                    ways = ways.into_iter().flat_map(one).collect();
                    let mut merged: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
                    ways.drain(..).for_each(|(waiting, p)| *merged.entry(waiting).or_default() += p);
                    ways = merged.into_iter().collect();
                }
            }
            if round >= 3_000 {
                ticks += p * f64::from(time);
            }
            for (waiting, p) in ways {
                *next.entry(launch((waiting, after.clone()))).or_default() += p;
            }
        }
        share = next;
    }
    tokens / ticks
}

fn systems(requests: std::ops::Range<u32>, ticks: std::ops::Range<u32>) -> impl Strategy<Value = System> {
    (1usize..4, requests).prop_flat_map(move |(models, requests)| {
        let latency = prop::collection::vec(prop::collection::vec(ticks.clone(), 1..=requests as usize), models);
        let weights = prop::collection::vec(prop::collection::vec(0.05f64..1.0, models), models);
        let tokens = prop::collection::vec(prop::collection::vec(0u8..3, models), models);
        (Just(requests), latency, weights, tokens).prop_map(|(requests, mut latency, weights, tokens)| {
            latency.iter_mut().for_each(|ticks| ticks.sort_unstable());
            let row = |row: Vec<f64>| row.iter().map(|w| w / row.iter().sum::<f64>()).collect();
            let tokens = tokens.iter().map(|row| row.iter().map(|&c| f64::from(c)).collect()).collect();
            System::new(requests, latency, weights.into_iter().map(row).collect(), tokens).unwrap()
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_chain_equals_the_slow_reference(system in systems(1..4, 1..5), pick in any::<prop::sample::Index>()) {
        let feasible = system.feasible();
        let thresholds = pick.get(&feasible);
        let found = throughput(&system, thresholds, Reach::default()).unwrap().throughput;
        let expected = reference(&system, thresholds);
        prop_assert!((found - expected).abs() <= 1e-3 * expected + 1e-9, "{found} {expected} {thresholds:?}");
    }

    #[test]
    fn the_simulation_covers_the_chain(system in systems(1..7, 1..12), pick in any::<prop::sample::Index>()) {
        let feasible = system.feasible();
        let thresholds = pick.get(&feasible);
        let exact = throughput(&system, thresholds, Reach::default()).unwrap().throughput;
        let found = simulate(&system, thresholds, Length { ways: 80_000, seed: 3 }).unwrap();
        // Three times the half width of a 95 % interval, or half a percent.
        let allowed = 3.0 * found.error + 0.005 * exact;
        prop_assert!((found.throughput - exact).abs() <= allowed, "{found:?} {exact} {thresholds:?}");
    }

    #[test]
    fn no_threshold_exceeds_the_best_policy(system in systems(1..6, 1..9)) {
        let best = decision::best(&system, Effort::default()).unwrap();
        prop_assert!(best.lower <= best.upper && best.upper - best.lower <= 1e-6 * best.upper + 1e-12, "{best:?}");
        for thresholds in system.feasible() {
            let found = throughput(&system, &thresholds, Reach::default()).unwrap().throughput;
            prop_assert!(found <= best.upper * (1.0 + 1e-9) + 1e-12, "{thresholds:?} {found} {best:?}");
        }
    }
}
