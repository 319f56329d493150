//! Scenarios on a virtual clock: text in, timeline out. `BLESS=1 cargo test -p tokenrouter-tests --test world` writes
//! the timelines anew; read the difference before you commit it.

use std::path::PathBuf;
use tokenrouter_tests::world::{algorithm, assert_idle, assert_text, parse, play};

macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { check(stringify!($name)); })*

        #[test]
        fn every_scenario_is_listed() {
            let mut files: Vec<String> = std::fs::read_dir(folder()).expect("the folder is there")
                .map(|entry| entry.expect("an entry").path().file_stem().expect("a name").to_string_lossy().into_owned())
                .collect();
            files.sort();
            assert_eq!(files, [$(stringify!($name)),*]);
        }
    };
}

scenarios![
    abort_pending,
    abort_queued,
    abort_running,
    bad_rows,
    chunked_prefill,
    ensemble,
    executor_errors,
    executor_gives_up,
    executor_panics,
    hop_and_return,
    learned_head,
    live_falls,
    messages_lost,
    pinned_beside_routed,
    pool_too_small,
    prefix_hits,
    prefix_of_a_silent_entry,
    prompt_tokens,
    r_stitch_runs,
    refused,
    stay,
    steps_that_stick,
    three_models,
    threshold_release,
    time_bound_release,
    timeouts,
    token_trigger,
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

fn check(name: &str) {
    let path = folder().join(format!("{name}.txt"));
    let text = std::fs::read_to_string(&path).expect("the scenario is there");
    let (scenario, expected) = text.split_once("---\n").expect("a line --- ends the scenario");
    let script = parse(scenario).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    let first = play(&script);
    assert_idle(&first);
    assert_text(&script, &*algorithm(&script), &first);
    assert_eq!(first.timeline, play(&script).timeline, "{name}: played twice");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, format!("{scenario}---\n{}", first.timeline)).expect("the timeline is written");
    } else {
        assert_eq!(first.timeline, expected, "{name}: the timeline differs");
    }
}
