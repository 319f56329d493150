//! Random worlds: any models, load, thresholds, memory, faults and departures. Users read what the definition of the
//! algorithm says, everything ends, and nothing is left behind.

use proptest::prelude::*;
use std::fmt::Write;
use tokenrouter_core::faults::{Fault, LinkFault};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::kv::LOSSES_FREE;
use tokenrouter_core::routing::{Algorithm, Decision, Prior, Route, StepView};
use tokenrouter_tests::world::{Script, algorithm, assert_idle, assert_text, parse, play, play_with};

const FAULTS: [&str; 6] = ["error", "lost", "panic", "bad_rows", "slow=40ms", "stuck"];
const LINK_FAULTS: [&str; 3] = ["lost", "duplicate", "reordered"];

fn matrix(rows: &[Vec<u32>]) -> String {
    let row = |row: &Vec<u32>| {
        let sum: u32 = row.iter().sum();
        let parts: Vec<String> = row.iter().map(|&part| format!("{:.17}", f64::from(part) / f64::from(sum))).collect();
        format!("[{}]", parts.join(","))
    };
    format!("[{}]", rows.iter().map(row).collect::<Vec<_>>().join(","))
}

prop_compose! {
    fn worlds()(
        models in 1usize..4,
        chances in prop::collection::vec(prop::collection::vec(1u32..6, 3), 3),
        pages in prop::collection::vec(6u32..40, 3),
        thresholds in prop::collection::vec(1u32..5, 3),
        rows in 1u32..6,
        chunk in 32u32..100,
        eos in prop::bool::ANY,
        requests in prop::collection::vec((0u32..60, 1u32..60, 1u32..20, 0usize..6), 1..7),
        aborts in prop::collection::vec((0usize..7, 1u32..400), 0..3),
        faults in prop::collection::vec((0usize..3, 0u64..12, 0usize..6), 0..3),
        link_faults in prop::collection::vec((0usize..3, 3u32..40, 0u32..9), 0..2),
    ) -> Script {
        let mut text = String::new();
        for model in 0..models {
            let (step, skill) = (5 * (model + 1), if model == 0 { "small" } else { "large" });
            let pages = pages[model];
            writeln!(text, "model m{model} skill={skill} step={step}ms row=0.5ms token=0.05ms pages={pages} rows={rows} chunk={chunk}").unwrap();
        }
        writeln!(text, "language hard=0.3 {}", if eos { "eos=0.03" } else { "" }).unwrap();
        match models {
            1 => writeln!(text, "route stay").unwrap(),
            2 => writeln!(text, "route r_stitch {{\"threshold\":0.1}}").unwrap(),
            _ => {
                let p = matrix(&chances);
                writeln!(text, "route bernoulli {{\"p\":{p},\"keep\":[[true,false,true],[true,true,true],[true,true,true]]}}").unwrap();
            }
        }
        let thresholds: Vec<String> = thresholds[..models].iter().map(u32::to_string).collect();
        writeln!(text, "batch fixed {} wait=70ms", thresholds.join(",")).unwrap();
        for (index, (at, prompt, max, only)) in requests.iter().enumerate() {
            let only = if *only < models && models > 1 { format!(" only=m{only}") } else { String::new() };
            writeln!(text, "at {at}ms submit r{index} prompt={prompt} max={max}{only}").unwrap();
        }
        for (who, at) in aborts {
            if let Some((submitted, ..)) = requests.get(who) {
                writeln!(text, "at {}ms abort r{who}", submitted + at).unwrap();
            }
        }
        for (model, step, kind) in faults {
            if model < models {
                writeln!(text, "fault m{model} {step} {}", FAULTS[kind]).unwrap();
            }
        }
        writeln!(text, "time step=200ms").unwrap();
        for (kind, every, seed) in link_faults {
            writeln!(text, "link_fault {} {every} seed={seed}", LINK_FAULTS[kind]).unwrap();
        }
        parse(&text).unwrap()
    }
}

proptest! {
    #[test]
    fn users_read_what_the_algorithm_says(script in worlds()) {
        let end = play(&script);
        assert_idle(&end);
        assert_text(&script, &*algorithm(&script), &end);
        // Everybody has been at the first model before anybody younger; elsewhere older ones may come later.
        for (index, model) in end.end.models.iter().enumerate() {
            let older = if index == 0 { 0 } else { script.requests().count() as u32 - 1 };
            prop_assert!(model.kv.losses_most <= LOSSES_FREE + older, "{}: {:?}", model.name, model.kv);
        }
        let harmless = |fault: &Fault| matches!(fault, Fault::Error | Fault::Slow(_));
        let recoverable = script.models.iter().flat_map(|model| &model.faults).all(|(_, fault)| harmless(fault))
            && script.link_faults.iter().all(|faults| faults.fault == LinkFault::Duplicate);
        prop_assert!(!recoverable || script.models.iter().any(|model| model.faults.len() > 2) || !end.timeline.contains("failed"),
            "{}", end.timeline);
    }
}

/// Stays, and panics at one position of one request: a fault in an actor itself.
#[derive(Clone, Debug)]
struct PanicsAt(u32);

impl Algorithm for PanicsAt {
    fn needs(&self, _: ModelIdx) -> tokenrouter_core::executor::Needs {
        tokenrouter_core::executor::Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.5, 0.5], vec![0.5, 0.5]], c: vec![vec![1.0, 1.0], vec![1.0, 1.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for PanicsAt {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        assert_ne!(step.position(), self.0, "on order");
        Ok(Decision { to: ModelIdx(1 - step.model.0), keep: true })
    }
}

/// A panic inside an actor takes its subserver's requests with it, with an error each, and nothing else: the children
/// are rebuilt and later requests are served.
#[test]
fn a_dead_actor_is_replaced() {
    let script = parse(
        "model left step=5ms\nmodel right step=9ms\n\
         at 0ms submit doomed prompt=20 max=20\n\
         at 1ms submit beside prompt=3 max=4\n\
         at 500ms submit after prompt=3 max=6\n",
    )
    .expect("a scenario");
    let end = play_with(&script, std::sync::Arc::new(PanicsAt(26)));
    assert_idle(&end);
    assert!(end.timeline.contains("doomed failed: internal failure"), "{}", end.timeline);
    assert!(end.timeline.contains("after Length"), "{}", end.timeline);
    assert_eq!(
        end.end.models.iter().map(|model| model.subserver.children_restarts).sum::<u64>(),
        1,
        "{}",
        end.timeline
    );
    let accepted: u64 = end.end.models.iter().map(|model| model.client.accepted).sum();
    assert_eq!(accepted, 3, "actors count on in their next life: {}", end.timeline);
    let log: Vec<_> = end.end.models.iter().flat_map(|model| &model.instruments.log).collect();
    assert!(log.len() == 1 && log[0].what.contains("rebuilt"), "{log:?}");
}
