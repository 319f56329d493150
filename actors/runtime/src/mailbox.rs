//! Mailboxes that are measured: every message carries when it was sent, so that how long it waited and how many wait is
//! known without asking the actor. Owner: the subserver keeps one [`Meter`] for each of its actors, whatever life they are in.
//! Invariant: a message is counted as waiting from before it is sent until it is handled or thrown away, whichever comes.

use crate::histogram::{Counts, Histogram};
use actix::dev::RecipientRequest;
use actix::dev::ToEnvelope;
use actix::prelude::*;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Measures the mailbox of one actor.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<Measured>);

#[derive(Debug, Default)]
struct Measured {
    depth: AtomicU64,
    depth_max: AtomicU64,
    wait: Histogram,
}

/// How a mailbox is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MailboxSnapshot {
    /// Messages that wait.
    pub depth: u64,
    /// Messages that ever waited at once.
    pub depth_max: u64,
    /// Messages handled so far.
    pub messages: u64,
    /// How long each waited.
    pub wait: Counts,
}

impl Meter {
    /// As it is now.
    pub fn read(&self) -> MailboxSnapshot {
        let measured = &self.0;
        let wait = measured.wait.read();
        let [depth, depth_max] = [&measured.depth, &measured.depth_max].map(|count| count.load(Ordering::Relaxed));
        MailboxSnapshot { depth, depth_max, messages: wait.count, wait }
    }

    fn wrap<M>(&self, message: M) -> Metered<M> {
        let depth = 1 + self.0.depth.fetch_add(1, Ordering::Relaxed);
        if depth > self.0.depth_max.load(Ordering::Relaxed) {
            self.0.depth_max.fetch_max(depth, Ordering::Relaxed);
        }
        Metered { message, waiting: Waiting(self.clone()), sent: Instant::now() }
    }
}

/// A message that waits in a measured mailbox.
#[derive(Debug)]
pub struct Metered<M> {
    message: M,
    waiting: Waiting,
    sent: Instant,
}

/// One of those counted as waiting.
#[derive(Debug)]
struct Waiting(Meter);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.depth.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<M: Message> Message for Metered<M> {
    type Result = M::Result;
}

impl<M> Metered<M> {
    /// The message, now that it is handled.
    pub fn open(self) -> M {
        self.waiting.0.0.wait.observe(self.sent.elapsed());
        self.message
    }
}

/// Lets an actor take measured messages of these kinds, each of which it handles.
macro_rules! takes_metered {
    ($actor:ty: $($message:ty),+ $(,)?) => {
        $(
            impl Handler<$crate::mailbox::Metered<$message>> for $actor {
                type Result = <$actor as Handler<$message>>::Result;

                fn handle(
                    &mut self,
                    metered: $crate::mailbox::Metered<$message>,
                    ctx: &mut Self::Context,
                ) -> Self::Result {
                    Handler::<$message>::handle(self, metered.open(), ctx)
                }
            }
        )+
    };
}
pub(crate) use takes_metered;

/// The measured address of an actor.
pub struct Mailbox<A: Actor> {
    address: Addr<A>,
    meter: Meter,
}

impl<A: Actor> Clone for Mailbox<A> {
    fn clone(&self) -> Self {
        Mailbox { address: self.address.clone(), meter: self.meter.clone() }
    }
}

impl<A: Actor> fmt::Debug for Mailbox<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mailbox").field(&std::any::type_name::<A>()).finish()
    }
}

impl<A: Actor> Mailbox<A> {
    /// The actor at this address, measured by this meter.
    pub fn new(address: Addr<A>, meter: Meter) -> Self {
        Mailbox { address, meter }
    }

    /// What measures it.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Sends if there is room.
    ///
    /// # Errors
    /// Gives the message back.
    pub fn try_send<M>(&self, message: M) -> Result<(), SendError<M>>
    where
        A: Handler<Metered<M>>,
        A::Context: ToEnvelope<A, Metered<M>>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.address.try_send(self.meter.wrap(message)).map_err(given_back)
    }

    /// Sends whether there is room or not: for the last word of a dying actor.
    #[allow(clippy::disallowed_methods, reason = "the last word of a dying actor must not fail on a full mailbox")]
    pub fn send_last<M>(&self, message: M)
    where
        A: Handler<Metered<M>>,
        A::Context: ToEnvelope<A, Metered<M>>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.address.do_send(self.meter.wrap(message));
    }

    /// Waits for room and for the answer.
    pub fn send<M>(&self, message: M) -> Request<A, Metered<M>>
    where
        A: Handler<Metered<M>>,
        A::Context: ToEnvelope<A, Metered<M>>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.address.send(self.meter.wrap(message))
    }

    /// For whoever needs to know no more than one kind of message.
    pub fn outlet<M>(&self) -> Outlet<M>
    where
        A: Handler<Metered<M>>,
        A::Context: ToEnvelope<A, Metered<M>>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        Outlet { recipient: self.address.clone().recipient(), meter: self.meter.clone() }
    }
}

/// The measured address of whoever takes one kind of message.
#[derive(Clone)]
pub struct Outlet<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    recipient: Recipient<Metered<M>>,
    meter: Meter,
}

impl<M> fmt::Debug for Outlet<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Outlet").field(&std::any::type_name::<M>()).finish()
    }
}

impl<M> Outlet<M>
where
    M: Message + Send + 'static,
    M::Result: Send,
{
    /// Sends if there is room.
    ///
    /// # Errors
    /// Gives the message back.
    pub fn try_send(&self, message: M) -> Result<(), SendError<M>> {
        self.recipient.try_send(self.meter.wrap(message)).map_err(given_back)
    }

    /// Waits for room and for the answer.
    pub fn send(&self, message: M) -> RecipientRequest<Metered<M>> {
        self.recipient.send(self.meter.wrap(message))
    }
}

fn given_back<M>(error: SendError<Metered<M>>) -> SendError<M> {
    match error {
        SendError::Full(metered) => SendError::Full(metered.message),
        SendError::Closed(metered) => SendError::Closed(metered.message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[derive(Message)]
    #[rtype(result = "u32")]
    struct Double(u32);

    struct Slow;

    impl Actor for Slow {
        type Context = Context<Self>;

        fn started(&mut self, ctx: &mut Self::Context) {
            ctx.set_mailbox_capacity(2);
        }
    }

    impl Handler<Double> for Slow {
        type Result = u32;

        fn handle(&mut self, Double(value): Double, _: &mut Self::Context) -> u32 {
            2 * value
        }
    }

    takes_metered!(Slow: Double);

    #[actix::test]
    async fn what_waits_is_counted_until_it_is_handled_or_thrown_away() {
        let meter = Meter::default();
        let mailbox = Mailbox::new(Slow.start(), meter.clone());
        assert_eq!(mailbox.send(Double(4)).await.unwrap(), 8);
        assert_eq!((meter.read().depth, meter.read().messages), (0, 1));
        // Nobody handles anything before this task waits.
        let outlet = mailbox.outlet::<Double>();
        let taken = (0..9).filter(|value| outlet.try_send(Double(*value)).is_ok()).count();
        assert!((2..9).contains(&taken), "{taken} of 9 found room");
        assert!(matches!(outlet.try_send(Double(77)), Err(SendError::Full(Double(77)))), "it is given back");
        let full = meter.read();
        assert_eq!((full.depth, full.messages), (taken as u64, 1), "what found no room does not wait");
        assert_eq!(full.depth_max, taken as u64 + 1, "it did for a moment");
        let filled = Instant::now();
        while filled.elapsed() < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
        assert_eq!(mailbox.send(Double(1)).await.unwrap(), 2);
        let empty = meter.read();
        assert_eq!((empty.depth, empty.messages), (0, taken as u64 + 2));
        assert!(empty.wait.sum_seconds >= 0.002 * taken as f64, "{empty:?}");
    }

    #[actix::test]
    async fn messages_to_an_actor_that_is_gone_do_not_wait() {
        let meter = Meter::default();
        let arbiter = Arbiter::new();
        let mailbox = Mailbox::new(Slow::start_in_arbiter(&arbiter.handle(), |_| Slow), meter.clone());
        assert_eq!(mailbox.send(Double(1)).await.unwrap(), 2);
        arbiter.stop();
        arbiter.join().expect("it ends");
        assert!(mailbox.send(Double(2)).await.is_err());
        assert!(matches!(mailbox.try_send(Double(3)), Err(SendError::Closed(_))));
        assert_eq!((meter.read().depth, meter.read().messages), (0, 1));
    }
}
