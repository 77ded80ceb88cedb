//! Jobs that wait for one of several threads, of clients that take turns.

use std::collections::VecDeque;

use inflight_base::ClientId;

/// Threads that take jobs. Each has its own order of turns, so that small jobs, which more threads take, do not use up
/// the turns of a client's large ones.
pub const NUM_THREADS: usize = 3;

/// Jobs of type `J` by their clients; those without a client are together one.
pub struct Turns<J> {
    clients: Vec<Client<J>>,
    /// Counts what is taken, and the clients that come.
    now: u64,
}

struct Client<J> {
    id: Option<ClientId>,
    /// At least one, in order of arrival.
    jobs: VecDeque<J>,
    /// When each thread last took one of its jobs; when it came, if that is later.
    last_turns: [u64; NUM_THREADS],
}

impl<J> Default for Turns<J> {
    fn default() -> Self {
        Self {
            clients: Vec::new(),
            now: 0,
        }
    }
}

impl<J> Turns<J> {
    /// Adds a job. A client that had none comes last.
    pub fn add(&mut self, client: Option<ClientId>, job: J) {
        if let Some(waiting) = self.clients.iter_mut().find(|it| it.id == client) {
            return waiting.jobs.push_back(job);
        }
        self.now += 1;
        self.clients.push(Client {
            id: client,
            jobs: VecDeque::from([job]),
            last_turns: [self.now; NUM_THREADS],
        });
    }

    /// Takes a job for a thread: the first that is for it, of the client whose last turn with this thread is longest
    /// ago.
    pub fn take(&mut self, thread: usize, is_for_it: impl Fn(&J) -> bool) -> Option<J> {
        let place = |client: &Client<J>| client.jobs.iter().position(&is_for_it);
        let places = self.clients.iter().map(place).enumerate();
        let places = places.filter_map(|(client, place)| Some((client, place?)));
        let (index, place) =
            places.min_by_key(|(client, _)| self.clients[*client].last_turns[thread])?;
        self.now += 1;
        let client = &mut self.clients[index];
        client.last_turns[thread] = self.now;
        let job = client.jobs.remove(place);
        if client.jobs.is_empty() {
            self.clients.remove(index);
        }
        job
    }

    /// Takes out the jobs for which `is_out` holds.
    pub fn extract_if(&mut self, is_out: impl Fn(&J) -> bool) -> Vec<J> {
        let mut out = Vec::new();
        for client in &mut self.clients {
            for job in std::mem::take(&mut client.jobs) {
                match is_out(&job) {
                    true => out.push(job),
                    false => client.jobs.push_back(job),
                }
            }
        }
        self.clients.retain(|client| !client.jobs.is_empty());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Jobs by name and size.
    fn turns(jobs: &[(Option<u64>, &'static str, usize)]) -> Turns<(&'static str, usize)> {
        let mut turns = Turns::default();
        for (client, name, size) in jobs {
            turns.add(client.map(ClientId), (*name, *size));
        }
        turns
    }

    fn take(
        turns: &mut Turns<(&'static str, usize)>,
        thread: usize,
        max: usize,
    ) -> Option<&'static str> {
        turns.take(thread, |job| job.1 <= max).map(|job| job.0)
    }

    #[test]
    fn clients_take_turns() {
        let mut turns = turns(&[
            (Some(1), "a1", 9),
            (Some(1), "a2", 1),
            (Some(1), "a3", 1),
            (Some(2), "b1", 1),
            (None, "c1", 9),
            (Some(2), "b2", 1),
        ]);
        assert_eq!(take(&mut turns, 2, 9), Some("a1"));
        assert_eq!(take(&mut turns, 2, 9), Some("b1"));
        assert_eq!(take(&mut turns, 2, 9), Some("c1"));
        assert_eq!(take(&mut turns, 0, 1), Some("a2"));
        assert_eq!(take(&mut turns, 0, 1), Some("b2"));
        assert_eq!(take(&mut turns, 0, 1), Some("a3"));
        assert_eq!(take(&mut turns, 2, 9), None);
    }

    #[test]
    fn small_jobs_do_not_use_up_the_turn_of_a_large_one() {
        let mut turns = turns(&[(None, "large", 9), (None, "s1", 1), (None, "s2", 1)]);
        turns.add(Some(ClientId(2)), ("other", 9));
        assert_eq!(take(&mut turns, 0, 1), Some("s1"));
        assert_eq!(take(&mut turns, 0, 1), Some("s2"));
        assert_eq!(take(&mut turns, 2, 9), Some("large"));
        assert_eq!(take(&mut turns, 2, 9), Some("other"));
    }

    #[test]
    fn a_client_that_comes_again_does_not_overtake() {
        let mut turns = turns(&[(Some(1), "a1", 1), (Some(2), "b1", 1), (Some(2), "b2", 1)]);
        assert_eq!(take(&mut turns, 0, 1), Some("a1"));
        turns.add(Some(ClientId(1)), ("a2", 1));
        assert_eq!(take(&mut turns, 0, 1), Some("b1"));
        turns.add(Some(ClientId(3)), ("c1", 1));
        assert_eq!(take(&mut turns, 0, 1), Some("a2"));
        assert_eq!(take(&mut turns, 0, 1), Some("b2"), "before who came later");
        assert_eq!(take(&mut turns, 0, 1), Some("c1"));
    }

    #[test]
    fn jobs_are_taken_out() {
        let mut turns = turns(&[(Some(1), "a1", 1), (Some(2), "b1", 2), (Some(1), "a2", 2)]);
        let out: Vec<_> = turns.extract_if(|job| job.1 == 2);
        assert_eq!(out, [("a2", 2), ("b1", 2)]);
        assert_eq!(take(&mut turns, 0, 9), Some("a1"));
        assert_eq!(take(&mut turns, 0, 9), None);
    }
}
