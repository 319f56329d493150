//! A process of a simulated server, for tests that kill it: `sim_process ME HOMES STEP_MS REQUESTS ADDRESS...`.
//! HOMES is the process of each model, separated by commas. It sends REQUESTS endless-looking requests itself, says
//! `ready`, and ends when its input does.

use std::io::Read;
use std::time::Duration;
use tokenrouter_actors::link::Address;
use tokenrouter_actors::runtime::start;
use tokenrouter_tests::processes::{Ask, Town, follow, is_connected};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [me, homes, step_ms, requests, addresses @ ..] = &words[..] else {
        panic!("usage: sim_process ME HOMES STEP_MS REQUESTS ADDRESS...");
    };
    let number = |word: &String| word.parse::<u64>().expect("a number");
    let homes: Vec<usize> = homes.split(',').map(|word| word.parse().expect("a number")).collect();
    let addresses: Vec<Address> = addresses.iter().map(|word| word.parse().expect("an address")).collect();
    let town = Town::restless(&homes, Duration::from_millis(number(step_ms)));
    actix_rt::System::new().block_on(async {
        let runtime = start(town.spec(number(me) as usize, &addresses)).expect("the process starts");
        while number(requests) > 0 && !is_connected(&runtime) {
            actix_rt::time::sleep(Duration::from_millis(2)).await;
        }
        for seed in 0..number(requests) {
            actix_rt::spawn(follow(runtime.clone(), Ask { seed, max: 900, only: None }, |_| {}));
        }
        println!("ready");
        let wait = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        wait.await.expect("a thread").expect("an input");
    });
}
