"""The language of the demo model: a small grammar of simple stories, and questions about them.

A template is text with `[this|that]` choices and `{fields}`; `Teller.say` expands both. All texts were written
for this file. The same random generator gives the same stories.
"""

import random
import re

NAMES = {
    "she": "Anna Bella Clara Daisy Elsie Fern Greta Hazel Ivy Juno Kira Lily Mina Nora Olive Poppy Rosa "
    "Stella Tilly Una Vera Willa Zoë Chloé Inès".split(),
    "he": "Arlo Benny Casper Dexter Edgar Finn Gus Hugo Igor Jasper Kip Leo Milo Ned Oscar Pip Rufus Sam "
    "Toby Ulf Victor Wally Björn José René".split(),
}
SYLLABLES = "ba bo da do fi ga go ka ki la lo lu ma mi mo na no pa po ra ri ro sa so ta ti to va vi za zo".split()
KINDS = (
    "fox bear rabbit mouse hedgehog squirrel badger otter owl duck frog turtle cat dog puppy kitten lion "
    "tiger elephant monkey penguin goat sheep pony donkey cow pig hen rooster robin crow snail bee ant "
    "beetle dragon giant wizard witch robot knight princess prince king queen sailor baker farmer painter "
    "gardener shepherd boy girl"
).split()
TRAITS = "kind shy brave curious gentle clever cheerful sleepy stubborn careful lively quiet proud patient".split()
HOMES = [
    "in a small house at the edge of the forest", "under the roots of an old oak tree",
    "by the shore of a wide lake", "on top of a green hill", "at the end of a long winding road",
    "in a village near the sea", "beside a slow brown river", "in a cottage with a red door",
    "in a valley full of flowers", "behind the old mill", "near a quiet pond", "in a tall stone tower",
]
PLACES = [
    "the forest", "the meadow", "the old mill", "the river", "the hill", "the market", "the garden",
    "the beach", "the barn", "the cave", "the pond", "the bridge", "the apple orchard", "the library",
    "the snowy mountain", "the lighthouse",
]
THINGS = (
    "lantern hat scarf drum kite book bell basket key map boat flute blanket mirror button ring spoon "
    "umbrella clock feather ball wagon necklace violin telescope"
).split()
FOODS = [
    "warm bread", "a red apple", "honey cake", "carrot soup", "a bowl of berries", "a slice of pie",
    "roasted nuts", "a pot of jam", "sweet pears", "cheese and crackers",
]
COLORS = "red blue green yellow silver golden purple white orange brown".split()
WEATHER = [
    "The sun was shining", "A soft rain was falling", "Snow covered the ground", "A cold wind was blowing",
    "The sky was grey", "The air smelled of flowers", "The leaves were turning gold", "It was a warm evening",
    "The moon was bright", "Mist lay over the fields",
]
LIKES = [
    "sing", "dance", "paint", "read old stories", "climb trees", "look at the stars", "pick flowers",
    "cook", "swim", "build little boats", "tell jokes", "play the flute", "collect smooth stones", "fly kites",
]

OPENINGS = [
    "[Once upon a time|Long ago|Once|A long time ago], there was {a_trait} {kind} named {hero}. {He} lived {home}.",
    "[Once upon a time|Not so long ago], {a_trait} {kind} named {hero} lived {home}.",
    "{hero} was {a_trait} {kind} who lived {home}.",
    "There once was a [little|young] {kind} called {hero}, and {he} lived {home}.",
]
SETTINGS = [
    "{He} loved to {like}[.|, and {he} did it every day.|, most of all in the [morning|evening|spring].]",
    "Every [morning|evening|Sunday], {he} liked to {like}.",
    "{His} best friend was {a_fkind} named {friend}. [They did everything together.|They loved to {like} together.]",
    "Everyone in {place} knew {him}, because {he} was so {trait}.",
]
DAYS = [
    "One day, {hero} went to {place}. {weather}.", "One [morning|afternoon], {hero} was walking to {place}. {weather}.",
    "{weather} when {hero} came to {place}.", "It was [a fine|an ordinary|a very long] day, and {hero} was [on the way|going] to {place}.",
]
NEXT_DAYS = [
    "The next [morning|day], {hero} woke up early.", "A week later, {hero} was at {place} again.",
    "When [spring|summer|winter] came, {hero} had another adventure.", "But that was not the end of the story.",
    "Some days later, {hero} and {friend} met at {place}.",
]

# A plot: its lines in order, each a list of alternative templates; then what the hero learned.
PLOTS = {
    "lost": (
        [
            ["{He} had {a_color} {thing} that {he} loved more than anything.", "{He} always carried {a_color} {thing}, a gift from {his} [grandmother|grandfather|mother]."],
            ["But when {he} looked, the {thing} was gone!", "Suddenly {he} noticed that the {thing} was [missing|not there]."],
            ["{He} looked under [the bench|a bush|the leaves], behind [a stone|the fence|a tree], and even in {place2}, but it was nowhere.", "{He} searched all of {place} and found nothing, and {he} [began to cry|felt very sad]."],
            ['"Have you seen my {thing}?" {he} asked {friend}.', '{friend} the {fkind} came by. "Why are you so sad?" {fhe} asked. "I have lost my {thing}," said {hero}.'],
            ['"Let us look together," said {friend}. "Four eyes see more than two."', '"I will help you," said {friend}, and {fhe} did not stop [looking|searching] until the sun went down.'],
            ["At last they found the {thing} [in the tall grass|near the water|on a low branch|in an old box] by {place2}.", "Then {friend} saw something {color} [in the tall grass|under a leaf]. It was the {thing}!"],
            ["{hero} hugged {friend} and laughed.", '"Thank you!" cried {hero}. {He} was so happy that {he} danced all the way home.'],
        ],
        "it is easier to find a thing when a friend helps you look",
    ),
    "share": (
        [
            ["{He} had {food} in {his} basket, and {he} was looking forward to eating it.", "{He} carried {food} for {his} lunch."],
            ["On the way {he} met {a_fkind} named {friend}, who [looked tired and thin|sat alone by the road|was shivering].", "There {he} saw {friend} the {fkind}, sitting alone."],
            ['"I have had nothing to eat since yesterday," said {friend} [quietly|in a small voice].', '"I am so hungry," said {friend}.'],
            ["{hero} looked at {his} food. {He} was hungry too.", "{hero} thought for a moment. There was only a little food."],
            ['"Come and sit with me," {he} said. "There is enough for two."', "Then {he} smiled, broke it in two, and gave {friend} the bigger half."],
            ["They ate together and told each other stories until [the stars came out|the sun went down].", "It was the best meal that {hero} had ever had."],
            ['"I will never forget this," said {friend}.', "A week later, {friend} came back with {food2}, and they shared that too."],
        ],
        "food tastes better when you share it",
    ),
    "fear": (
        [
            ["There was one thing that {hero} was afraid of: [the dark|deep water|thunder|high places].", "{hero} had a secret. {He} was afraid of [the dark|thunder|deep water]."],
            ["That evening a {noise} came from {place2}.", "All at once the sky grew dark, and a {noise} was heard near {place2}."],
            ["{hero} wanted to run home and hide under the bed.", "{His} knees shook, and {his} heart was beating fast."],
            ['But then {he} heard {friend} calling, "Help! I am stuck!"', "But {friend} the {fkind} was out there, all alone."],
            ["{hero} took a deep breath and [counted to ten|lit the lantern|sang a little song].", '"If I do not go, nobody will," {hero} said to {himself}.'],
            ["Step by step {he} walked through {place2}, until {he} found {friend} behind a [fallen tree|big stone].", "{He} held on to the rope and pulled {friend} out."],
            ['"You are the bravest {kind} I know," said {friend}. "I was afraid the whole time," said {hero}.', "They walked home hand in hand, and the {noise} did not sound so bad any more."],
        ],
        "being brave means to go on even when you are afraid",
    ),
    "way": (
        [
            ["{He} wanted to visit {friend} the {fkind}, who lived beyond {place2}.", "{hero} followed {a_color} butterfly, farther and farther."],
            ["Soon a thick fog came, and {he} could not see the path.", "When {he} looked around, {he} did not know where {he} was."],
            ["{He} walked to the left, and {he} walked to the right, but every tree looked the same.", "{He} called for help, but only the wind answered."],
            ["{He} sat down on a stone and tried to think.", '"I must not run," {he} told {himself}. "I must think."'],
            ["Then {he} heard the sound of the river. {He} knew that the river ran past {his} home.", "Far away {he} saw a small light. It was the lantern in {his} own window!"],
            ["So {he} followed it, slowly and carefully, over hills and stones.", "{He} went on step by step, and never let it out of {his} [sight|mind]."],
            ["At last {he} saw {his} own door. {friend} was waiting there with {food}.", "It was late when {he} came home, and nothing had ever looked so good to {him}."],
        ],
        "a calm mind finds the way",
    ),
    "build": (
        [
            ["{hero} had an idea. {He} wanted to build a [boat|kite|treehouse|bridge|flying machine].", '"I will build a [boat|kite|wagon|treehouse] all by myself," said {hero}.'],
            ["{He} found some wood, a rope and {a_color} [cloth|blanket], and {he} worked all day.", "{He} worked from morning until night, with a hammer and a box of nails."],
            ["But when {he} tried it, it fell apart with a loud crash.", "But the first one broke, and the second one broke too."],
            ["{friend} the {fkind} laughed. But when {fhe} saw how sad {hero} was, {fhe} stopped.", '"I give up," said {hero}, and {he} kicked the pieces.'],
            ['"Tell me what went wrong," said {friend}. They looked at it together.', '"Every builder breaks things," said {friend}. "What can we do better?"'],
            ["They used [stronger rope|longer nails|thicker wood], and they worked slowly.", "This time {hero} made a drawing first, and {friend} held the wood."],
            ["And on the third day, it worked! Everyone in {place} came to see it.", "When it was done, it was [strong and beautiful|the finest in all the land]."],
        ],
        "you have to fail a few times before it works",
    ),
    "truth": (
        [
            ["{friend} the {fkind} had {a_color} {thing}, and {hero} was allowed to play with it.", "{friend} had lent {hero} a beautiful {color} {thing}."],
            ["{hero} was not careful. The {thing} fell on the floor and broke.", "But {hero} ran too fast, stumbled, and dropped it. It broke in two."],
            ["{He} looked around. Nobody had seen it.", '"Nobody needs to know," {he} thought, and {he} hid it under a bush.'],
            ["That night {he} could not sleep.", "All day long {his} stomach hurt, and nothing was fun."],
            ["In the morning {he} went to {friend}. \"I broke your {thing},\" {he} said. \"I am sorry.\"", 'At last {he} told the truth. "It was me," {he} said, with tears in {his} eyes.'],
            ["{friend} was quiet for a while. \"Thank you for telling me,\" {fhe} said.", '"I am sad about the {thing}," said {friend}, "but I am glad that you told me."'],
            ["Together they mended it with glue and string, and it was almost as good as new.", "{hero} worked for a week in {place2} and bought {friend} a new one."],
        ],
        "the truth is hard to say but easy to carry",
    ),
    "stranger": (
        [
            ["A stranger had come to {place}. It was {a_fkind} named {friend}.", "That day {a_fkind} moved into the empty house next door. {FHis} name was {friend}."],
            ["Nobody spoke to {fhim}, because {fhe} [looked different|came from far away|had a strange hat].", '"We do not know {fhim}," said the others, and they turned away.'],
            ["{hero} was [shy|not sure] too. {He} watched from behind the fence.", "{hero} saw that {friend} was sitting alone, drawing in the sand."],
            ['Then {he} took {food} and knocked on the door. "Hello," {he} said. "I am {hero}."', '{He} walked over. "Would you like to play with me?" {he} asked.'],
            ["{friend} smiled for the first time that day.", '"I was hoping that someone would ask," said {friend}.'],
            ["{friend} knew [songs|games|stories] that nobody had ever heard, and {fhe} taught them all to {hero}.", "It turned out that {friend} could {like}, and soon everyone wanted to learn it."],
            ["From then on there was always an extra chair for {friend}.", "Soon nobody could remember why they had been afraid."],
        ],
        "a stranger is a friend you have not met",
    ),
    "race": (
        [
            ["There was going to be a big race from {place} to {place2}.", "Every year there was a race to {place2}, and the prize was {a_color} {thing}."],
            ['"You are too slow," said {friend} the {fkind}. "I will win."', "{friend} the {fkind} was the fastest of all, and {fhe} knew it."],
            ["{hero} practiced every morning, [in the rain and in the sun|up the hill and down again].", "{hero} knew that {he} was not fast. But {he} wanted to try."],
            ["The race began. {friend} ran ahead, and {hero} came last.", 'Ready, steady, go! Soon {friend} was far in front.'],
            ["But near {place2}, {friend} stepped into a hole and hurt {fhis} foot.", "Then {friend} fell and could not get up."],
            ["{hero} could have won. Instead {he} stopped and held out {his} hand.", "{hero} looked at the finish, and then {he} looked at {friend}. {He} turned back."],
            ["They crossed the line together, very slowly, and everyone cheered.", "They came last of all, but nobody had ever been cheered so loudly."],
        ],
        "a friend is worth more than a prize",
    ),
    "sound": (
        [
            ["Suddenly {he} heard a {noise}. It came from {place2}.", '"What was that?" {he} asked. There was a {noise}, and then it was quiet.'],
            ["{friend} the {fkind} had heard it too. \"Let us find out what it is,\" {fhe} said.", "{He} ran to {friend} the {fkind}, and together they went to look."],
            ["They followed the sound past [the well|the fence|the big rock] and into {place2}.", "They tiptoed closer and closer."],
            ["Was it a monster? Was it a ghost?", '"Maybe it is a monster," whispered {friend}.'],
            ["But it was only a tiny {baby}, caught in [a net|a thorn bush|an old box].", "Behind a stone they found a little {baby} that had fallen out of its nest."],
            ["{hero} [gently|carefully] set it free and gave it some water.", "Very carefully, they lifted it up and brought it back to its mother."],
            ["It looked at them with big eyes, and then it was gone.", '"It was more afraid than we were," said {hero}.'],
        ],
        "many scary things are small when you look at them closely",
    ),
    "garden": (
        [
            ["An old woman at {place} gave {him} a single seed. \"Take good care of it,\" she said.", "{hero} found a strange {color} seed on the path and took it home."],
            ["{He} planted it in the garden and watered it every day.", "{He} put it in the ground, sat down, and waited."],
            ["A day went by, and nothing happened. A week went by, and nothing happened.", "Nothing grew. {hero} looked every morning and every evening."],
            ['"It is just a stone," said {friend} the {fkind}. "Throw it away."', "{friend} the {fkind} thought that it was a waste of time."],
            ['But {hero} shook {his} head. "It needs more time," {he} said.', "But {hero} kept on watering it, [in wind and rain|and sang to it at night]."],
            ["Then, one morning, there was a tiny green leaf.", "And in the spring a small plant came out of the earth."],
            ["It grew and grew, until it was a tree full of {color} [apples|flowers|pears], and there was enough for everyone.", "By summer it was taller than the house, and all the birds came to live in it."],
        ],
        "good things need time",
    ),
    "storm": (
        [
            ["That night a great storm came over {place}.", "The rain did not stop for three days, and the river rose higher and higher."],
            ["The bridge to {place2} was washed away, and {friend} the {fkind} was on the other side.", "The wind broke the roof of {friend}'s house. {friend} was {a_fkind} who lived near {place2}."],
            ['"What shall we do?" everyone cried.', "Everyone ran around and shouted, and nobody listened."],
            ["{hero} climbed on a [barrel|stone|wagon]. \"If each of us carries one thing,\" {he} said, \"we can do it.\"", '"Let us work together," said {hero}. {He} was not the biggest, but {he} had a plan.'],
            ["The strong ones carried wood, the small ones carried nails, and {hero} held the light.", "One brought a rope, one brought a ladder, and one brought {food} for everybody."],
            ["They worked all night long, side by side.", "It was hard work, and they were wet and cold, but they sang."],
            ["When the sun came up, it was done, and {friend} was safe.", "In the morning the storm was over. {friend} thanked them all with {food2}."],
        ],
        "many small hands can do a big thing",
    ),
    "party": (
        [
            ["It was {his} birthday, but nobody said a word about it.", "{hero} woke up and smiled, because it was {his} birthday."],
            ["{He} went to {friend} the {fkind}, but {friend} was busy. \"Not now,\" {fhe} said, and closed the door.", "{He} met {friend} the {fkind} on the road, but {friend} only said hello and hurried on."],
            ["{He} went to {place2}, and there was nobody.", "The whole village was quiet, and all the doors were closed."],
            ["{hero} felt lonely. \"They have all forgotten me,\" {he} said.", "{He} sat down by the water and threw stones into it, one after the other."],
            ["In the evening {he} went home. The house was dark.", "When it was getting dark, {he} slowly walked back."],
            ['{He} opened the door, and a hundred candles were lit. "Surprise!" everyone shouted.', "Suddenly there was music, and all {his} friends jumped out from behind the chairs."],
            ["There was {food} and {a_color} {thing} with a bow on it, and they danced until midnight.", "{friend} gave {him} {a_color} {thing}. \"We have been busy all day,\" {fhe} said, \"with your party.\""],
        ],
        "friends think of you even when you do not see it",
    ),
}
NOISES = ["loud bang", "strange humming", "soft crying", "long howl", "scratching sound", "deep rumble"]
BABIES = "bird rabbit duckling lamb mouse bat fawn squirrel".split()
ENDINGS = [
    "{hero} [smiled|was happy|slept very well that night].", "And {hero} learned that {moral}.",
    "Since that day, {hero} knew that {moral}.", '"{Moral}," said {hero}.', "And they lived happily ever after.",
    "And if you go to {place} today, you may still see {him} there.",
]
REQUESTS = [
    "Tell me a story about {a_kind}.", "Tell me a story about {a_kind} and {a_fkind}.", "Tell me a story.",
    "Tell me a story about {a_kind} named {hero}.", "Write a story about {a_trait} {kind}.", "Please tell me a story about {hero} the {kind}.",
    "Can you tell me a story about {a_kind}?", "I want to hear a story about {a_kind} who loves to {like}.",
    "Tell a story about {hero} and {friend}.", "A story about {a_kind}, please.", "Tell me a long story about {a_kind}.",
]
QUESTIONS = [
    ("What did {hero} learn?", "{hero} learned that {moral}."),
    ("What is the moral of the story?", "The moral is that {moral}."),
    ("Who was {friend}?", "{friend} was {a_fkind} and a friend of {hero}."),
    ("What was the name of the {kind}?", "The {kind} was called {hero}."),
    ("Where did {hero} live?", "{hero} lived {home}."),
    ("What did {hero} love to do?", "{hero} loved to {like}."),
]


def article(noun):
    return ("an " if noun[0] in "aeiouAEIOU" else "a ") + noun


class Teller:
    """Tells stories: each with a hero, a friend, places, and one plot or several in sequence."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def say(self, template, fields):
        """One expansion of a template: a choice of each `[a|b]`, innermost first, then the fields."""
        while "[" in template:
            template = re.sub(r"\[([^][]*)\]", lambda m: self.rng.choice(m.group(1).split("|")), template)
        # A field's value may contain fields.
        while "{" in template:
            template = template.format_map(fields)
        return template

    def name(self, pronoun, taken):
        """Usually a known name, otherwise one made of syllables, so that the model copies names instead of
        recalling them."""
        while True:
            if self.rng.random() < 0.7:
                name = self.rng.choice(NAMES[pronoun])
            else:
                name = "".join(self.rng.choices(SYLLABLES, k=self.rng.choice([2, 2, 3]))).capitalize()
            if name != taken:
                return name

    def kind(self, pronoun, taken):
        not_this = {"she": {"boy", "king", "prince", "rooster", "wizard"}, "he": {"girl", "queen", "princess", "hen", "cow", "witch"}}
        while True:
            if self.rng.random() < 0.93:
                kind = self.rng.choice(KINDS)
            else:
                kind = "".join(self.rng.choices(SYLLABLES, k=self.rng.choice([2, 3])))
            if kind != taken and kind not in not_this[pronoun]:
                return kind

    def cast(self):
        """The fields of one story."""
        rng, fields = self.rng, {}
        for prefix, role in (("", "hero"), ("f", "friend")):
            he = rng.choice(["he", "she"])
            him, his = {"he": ("him", "his"), "she": ("her", "her")}[he]
            fields[role] = self.name(he, fields.get("hero"))
            fields[prefix + "kind"] = kind = self.kind(he, fields.get("kind"))
            fields["a_" + prefix + "kind"] = article(kind)
            for key, value in (("he", he), ("him", him), ("his", his), ("himself", him + "self")):
                fields[prefix + key] = value
                fields[prefix.upper() + key.capitalize()] = value.capitalize()
        fields["trait"] = rng.choice(TRAITS)
        fields["a_trait"] = article(fields["trait"])
        for key, values in (("home", HOMES), ("like", LIKES)):
            fields[key] = rng.choice(values)
        return fields

    def scene(self, fields):
        """The fields that change from plot to plot of one story."""
        rng = self.rng
        fields["place"], fields["place2"] = rng.sample(PLACES, 2)
        fields["food"], fields["food2"] = rng.sample(FOODS, 2)
        for key, values in (("thing", THINGS), ("color", COLORS), ("weather", WEATHER), ("noise", NOISES), ("baby", BABIES)):
            fields[key] = rng.choice(values)
        fields["a_color"] = article(fields["color"])

    def story(self, num_plots):
        """The text of a story, and its fields."""
        rng, fields = self.rng, self.cast()
        self.scene(fields)
        say = lambda templates: self.say(rng.choice(templates), fields)
        opening = [say(OPENINGS)] + [self.say(s, fields) for s in rng.sample(SETTINGS, rng.choice([0, 1, 1, 2]))]
        paragraphs = [" ".join(opening)]
        for n, plot in enumerate(rng.sample(sorted(PLOTS), num_plots)):
            lines, moral = PLOTS[plot]
            if n > 0:
                self.scene(fields)
            fields["moral"], fields["Moral"] = moral, moral[0].upper() + moral[1:]
            told = [say(NEXT_DAYS if n > 0 else DAYS)] + [say(line) for line in lines]
            cut = rng.randrange(3, len(told) - 1)
            paragraphs += [" ".join(told[:cut]), " ".join(told[cut:])]
        endings = rng.sample(ENDINGS, rng.choice([1, 1, 2]))
        paragraphs[-1] += " " + " ".join(self.say(e, fields) for e in sorted(endings, key=ENDINGS.index))
        return "\n\n".join(paragraphs), fields

    def document(self):
        """The turns of one training text: `[story]`, or `[request, story, question, answer, ...]`."""
        rng = self.rng
        num_plots = rng.choices([1, 2, 3, 5], [70, 17, 8, 5])[0]
        text, fields = self.story(num_plots)
        if rng.random() < 0.35:
            return [text]
        request = REQUESTS[-1] if num_plots > 2 else rng.choice(REQUESTS[:-1])
        turns = [self.say(request, fields), text]
        for question, answer in rng.sample(QUESTIONS, rng.choice([0, 0, 1, 2])):
            # Only what the story mentions can be asked about.
            answer = self.say(answer, fields)
            subject = fields["friend"] if "{friend}" in question else fields["like"] if "love to do" in question else fields["hero"]
            if subject in text:
                turns += [self.say(question, fields), answer]
        return turns


if __name__ == "__main__":
    teller = Teller(1)
    for _ in range(3):
        print("\n---\n".join(teller.document()), end="\n=====\n")
